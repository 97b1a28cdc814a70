// The toy problem y = d + y^5: its fixed points, its iteration, and the panel that shows them.

import { Cobweb } from "./cobweb.js";

const TURN = 5 ** -0.25; // where T'(y) = 5 y^4 = 1
const FAR = 3; // all fixed points are closer for the d of the panel
const MAX_STEPS = 200;

export const T = (y, d) => d + y ** 5;

/**
 * The fixed points of T in ascending order, as { y, slope, attracts }: one attracts if |T'(y)| < 1.
 * d + y^5 - y has its extrema at -TURN and TURN, so it has at most one root on each side of them and between.
 */
export function fixedPoints(d) {
  const f = (y) => T(y, d) - y;
  return [[-FAR, -TURN], [-TURN, TURN], [TURN, FAR]].flatMap(([low, high]) => {
    if (f(low) * f(high) > 0) return [];
    const y = bisect(f, low, high);
    return [{ y, slope: 5 * y ** 4, attracts: 5 * y ** 4 < 1 }];
  });
}

function bisect(f, low, high) {
  for (let k = 0; k < 60; k++) {
    const middle = (low + high) / 2;
    if (f(low) * f(middle) <= 0) high = middle;
    else low = middle;
  }
  return (low + high) / 2;
}

/** The open interval of starts that converge, or null if there is none. */
export function basin(d) {
  const roots = fixedPoints(d);
  return roots.length === 3 ? [roots[0].y, roots[2].y] : null;
}

/** Iterate until y moves by at most 1e-6. Return { ys, outcome }: "converged", "diverged" or "unfinished". */
export function iterate(d, y0) {
  const ys = [y0];
  for (let k = 0; k < MAX_STEPS; k++) {
    ys.push(T(ys[k], d));
    if (Math.abs(ys[k + 1]) > 10) return { ys, outcome: "diverged" };
    if (Math.abs(ys[k + 1] - ys[k]) <= 1e-6) return { ys, outcome: "converged" };
  }
  return { ys, outcome: "unfinished" };
}

/** Say what the iteration does, and from where it would converge. */
function verdict(d, { ys, outcome }) {
  const good = basin(d)?.map((y) => y.toFixed(3));
  const limits = good ? `Starts between ${good[0]} and ${good[1]} converge.` : "For this d every start diverges.";
  if (outcome === "diverged") return `Diverges. ${limits}`;
  const { y, slope } = fixedPoints(d).find(({ attracts }) => attracts);
  const moved = outcome === "converged" ? "Converges in" : "Still moving after";
  const target = `to y* = ${y.toFixed(4)}, where the slope is ${slope.toFixed(2)}`;
  return `${moved} ${ys.length - 1} steps ${target}. ${limits}`;
}

/** Connect the sliders, the plot and the verdict. */
export function connectToy(element) {
  const [d, y0] = [element("d"), element("y0")];
  const draw = () => {
    const input = Number(d.value);
    const found = iterate(input, Number(y0.value));
    cobweb.draw({ T: (y) => T(y, input), ys: found.ys, roots: fixedPoints(input), good: basin(input) });
    for (const slider of [d, y0]) element(`${slider.id}-text`).textContent = Number(slider.value).toFixed(2);
    element("toy-verdict").textContent = verdict(input, found);
  };
  const cobweb = new Cobweb(element("cobweb"), (start) => {
    y0.value = start;
    draw();
  });
  for (const slider of [d, y0]) slider.addEventListener("input", draw);
  draw();
}
