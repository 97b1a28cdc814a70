"""invert: inverses of many small matrices, one program each. The reference is `torch.linalg.inv`.

The device code is in `inverse_kernel.py`. Nothing is allocated but the result, so a capture may contain it.
"""

import torch
from torch import Tensor

from banach.kernels import host

LARGEST = 64  # rows: a program of 8 warps holds its matrix in registers; 128 rows would spill


def invert(M: Tensor) -> Tensor:
    """Return the inverse of every matrix of a batch (..., n, n), by Gauss-Jordan elimination without pivots.

    Larger matrices are cut into four blocks, the Schur complement of the first inverted in turn.

    Args:
        M: complex64; each matrix has a positive definite Hermitian part.
    """
    from banach.kernels.inverse_kernel import gauss_jordan

    n = M.shape[-1]
    if n > LARGEST:
        (A, B), (C, D) = (rows.tensor_split(2, -1) for rows in M.tensor_split(2, -2))
        A = invert(A)
        left, right = C @ A, A @ B
        D = invert(D - C @ right)
        right_D = right @ D
        return torch.cat([torch.cat([A + right_D @ left, -right_D], -1), torch.cat([-D @ left, D], -1)], -2)
    N = max(16, host.power_of_two(n))
    given = torch.view_as_real(M.resolve_conj().contiguous())
    found = torch.empty_like(given)
    gauss_jordan[(M.numel() // n**2,)](given, found, n, N=N, num_warps=max(1, N * N // 512))
    return torch.view_as_complex(found)
