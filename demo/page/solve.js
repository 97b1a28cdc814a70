// Find z = T(z), as banach.solve does for one sample. A solver sees z and T(z) and proposes the next z.

export const picard = () => (at) => at.Tz;

/**
 * Anderson acceleration: z <- T(z) - (dZ + dR) c, where c minimises |r - dR c| and r = T(z) - z.
 * dZ and dR hold the last `memory` differences. A fit that cannot be trusted gives way to a Picard step; limits
 * are those of banach.Anderson.
 */
export function anderson(memory = 5, { ridge = 10 * 2 ** -23, bound = 1e4, growth = 10, patience = 10 } = {}) {
  const gram = Array.from({ length: memory }, () => new Float64Array(memory));
  const dZ = [], dR = [];
  let before = null;

  function trusted(c, at) {
    const size = Math.hypot(...c) / bound;
    return size + at.residual / at.least / growth + (at.step - at.leastAt) / patience <= 1;
  }

  return (at) => {
    const last = before;
    before = at;
    if (last === null) return at.Tz;
    const slot = (at.step - 2) % memory;
    dZ[slot] = subtract(at.z, last.z);
    dR[slot] = subtract(at.r, last.r);
    dR.forEach((other, i) => { gram[slot][i] = gram[i][slot] = dot(dR[slot], other); });
    gram[slot][slot] *= 1 + ridge;
    const used = dR.length;
    const rows = dR.map((difference, i) => [...gram[i].slice(0, used), dot(difference, at.r)]);
    const c = eliminate(rows);
    if (!trusted(c, at)) return at.Tz;
    const correction = (i) => c.reduce((sum, ck, k) => sum + ck * (dZ[k][i] + dR[k][i]), 0);
    return at.Tz.map((value, i) => value - correction(i));
  };
}

export const SOLVERS = { picard, anderson };

/**
 * Iterate from z0 until the RMS of T(z) - z is at most eps.
 * Returns { iterates, residuals, converged }: iterates[k] is z after k steps, residuals[k - 1] that of step k.
 */
export async function solve(T, z0, step, { eps, maxSteps }) {
  const iterates = [z0], residuals = [];
  let least = Infinity, leastAt = 0;
  for (let k = 1; k <= maxSteps; k++) {
    const z = iterates[k - 1];
    const Tz = await T(z);
    const r = subtract(Tz, z);
    const residual = rms(r);
    if (!Number.isFinite(residual)) break;
    if (residual < least) [least, leastAt] = [residual, k];
    residuals.push(residual);
    iterates.push(step({ step: k, z, Tz, r, residual, least, leastAt }));
    if (residual <= eps) return { iterates, residuals, converged: true };
  }
  return { iterates, residuals, converged: false };
}

export const subtract = (a, b) => a.map((value, i) => value - b[i]);

export const rms = (a) => Math.sqrt(dot(a, a) / a.length);

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** Solve A x = b by Gaussian elimination in `rows`, those of [A | b]. A is positive definite: no pivoting. */
function eliminate(rows) {
  const n = rows.length;
  for (let k = 0; k < n; k++) {
    for (let i = k + 1; i < n; i++) {
      const factor = rows[i][k] / rows[k][k];
      for (let j = k; j <= n; j++) rows[i][j] -= factor * rows[k][j];
    }
  }
  const x = new Array(n);
  for (let i = n - 1; i >= 0; i--) {
    let sum = rows[i][n];
    for (let j = i + 1; j < n; j++) sum -= rows[i][j] * x[j];
    x[i] = sum / rows[i][i];
  }
  return x;
}
