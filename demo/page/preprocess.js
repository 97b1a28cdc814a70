// Turn a drawing into an image like those of the training data: cropped, scaled to a box, centred by its mass.

const FAINT = 0.1; // of white: fainter pixels do not count as ink

/**
 * Return the image as `size` x `size` values from 0 to 1, or null if there is no ink.
 * `ink` has `side` x `side` values from 0 (black) to 1 (white). The longer side of the digit becomes `box` pixels;
 * its centre of mass moves to pixel `centre`, counted from 0, in both directions.
 */
export function preprocess(ink, side, { size, box, centre }) {
  const bounds = inkBounds(ink, side);
  if (bounds === null) return null;
  const longer = Math.max(bounds.width, bounds.height);
  const width = Math.max(1, Math.round((bounds.width / longer) * box));
  const height = Math.max(1, Math.round((bounds.height / longer) * box));
  const digit = shrink(ink, side, bounds, width, height);
  const [x, y] = massCentre(digit, width, height);
  const place = (mass, length) => clamp(Math.round(centre - mass), 0, size - length);
  const [left, top] = [place(x, width), place(y, height)];
  const image = new Float32Array(size * size);
  for (let row = 0; row < height; row++) {
    image.set(digit.subarray(row * width, (row + 1) * width), (top + row) * size + left);
  }
  return image;
}

function inkBounds(ink, side) {
  let [left, right, top, bottom] = [side, -1, side, -1];
  for (let i = 0; i < ink.length; i++) {
    if (ink[i] <= FAINT) continue;
    const [x, y] = [i % side, Math.floor(i / side)];
    [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
  }
  return right < 0 ? null : { left, top, width: right - left + 1, height: bottom - top + 1 };
}

/** Average the pixels inside `bounds` over a grid of width x height cells; a pixel on an edge counts in part. */
function shrink(ink, side, bounds, width, height) {
  const columns = weights(bounds.left, bounds.width, width);
  const rows = weights(bounds.top, bounds.height, height);
  const out = new Float32Array(width * height);
  rows.forEach((row, j) => columns.forEach((column, i) => {
    let sum = 0;
    for (const [y, a] of row) for (const [x, b] of column) sum += a * b * ink[y * side + x];
    out[j * width + i] = sum;
  }));
  return out;
}

/** For each of `cells` cells: the pixels it covers and their shares, which add up to 1. */
function weights(start, length, cells) {
  const cell = length / cells;
  return Array.from({ length: cells }, (_, k) => {
    const [from, to] = [start + k * cell, start + (k + 1) * cell];
    const covered = [];
    for (let pixel = Math.floor(from); pixel < Math.min(Math.ceil(to), start + length); pixel++) {
      covered.push([pixel, (Math.min(pixel + 1, to) - Math.max(pixel, from)) / cell]);
    }
    return covered;
  });
}

function massCentre(image, width, height) {
  let [mass, x, y] = [0, 0, 0];
  image.forEach((value, i) => {
    mass += value;
    x += value * (i % width);
    y += value * Math.floor(i / width);
  });
  return mass ? [x / mass, y / mass] : [(width - 1) / 2, (height - 1) / 2];
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
