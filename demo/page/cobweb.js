// The toy problem y = d + y^5: its fixed points, its iteration, and the cobweb that shows both.

import { line, make, onDrag, points, text } from "./svg.js";

const REACH = 1.25; // the plot shows -REACH to REACH
const SIDE = 420, EDGE = 26;
const TURN = 5 ** -0.25; // where T'(y) = 5 y^4 = 1
const MAX_STEPS = 200;

export const T = (y, d) => d + y ** 5;

/**
 * The fixed points of T, in ascending order, as { y, slope, attracts }: one attracts if |T'(y)| < 1.
 * d + y^5 - y has its extrema at -TURN and TURN, so each of the three intervals between has at most one root.
 */
export function fixedPoints(d) {
  const f = (y) => T(y, d) - y;
  return [[-3, -TURN], [-TURN, TURN], [TURN, 3]].flatMap(([low, high]) => {
    if (f(low) * f(high) > 0) return [];
    const y = bisect(f, low, high);
    return [{ y, slope: 5 * y ** 4, attracts: 5 * y ** 4 < 1 }];
  });
}

/** The open interval of starts that converge, or null if none does. */
export function basin(d) {
  const roots = fixedPoints(d);
  return roots.length === 3 ? [roots[0].y, roots[2].y] : null;
}

/** Iterate y <- T(y) until it moves by at most 1e-6; return { ys, outcome: "converged" | "diverged" | "unfinished" }. */
export function iterate(d, y0) {
  const ys = [y0];
  for (let k = 0; k < MAX_STEPS; k++) {
    ys.push(T(ys[k], d));
    if (Math.abs(ys[k + 1]) > 10) return { ys, outcome: "diverged" };
    if (Math.abs(ys[k + 1] - ys[k]) <= 1e-6) return { ys, outcome: "converged" };
  }
  return { ys, outcome: "unfinished" };
}

export class Cobweb {
  /** `onStart(y0)` is called while the pointer drags over the plot. */
  constructor(svg, onStart) {
    this.svg = svg;
    svg.setAttribute("viewBox", `0 0 ${SIDE} ${SIDE}`);
    onDrag(svg, (x) => onStart(((x - SIDE / 2) / (SIDE / 2 - EDGE)) * REACH));
  }

  draw(d, y0) {
    const { ys } = iterate(d, y0);
    const curve = Array.from({ length: 161 }, (_, i) => -REACH + (i / 80) * REACH);
    this.svg.replaceChildren(
      make("clipPath", { id: "inside" }, make("rect", { x: EDGE, y: EDGE, width: SIDE - 2 * EDGE, height: SIDE - 2 * EDGE })),
      ...frame(),
      make("g", { "clip-path": "url(#inside)" },
        ...divergingBands(d),
        line(xOf(-REACH), yOf(-REACH), xOf(REACH), yOf(REACH), "diagonal"),
        make("polyline", { points: points(curve.map((y) => [xOf(y), yOf(T(y, d))])), class: "curve" }),
        make("polyline", { points: points(web(ys)), class: "web" })),
      ...fixedPoints(d).filter(({ y }) => Math.abs(y) <= REACH).map(({ y, attracts }) =>
        make("circle", { cx: xOf(y), cy: yOf(y), r: 6, class: attracts ? "attracts" : "repels" })),
      make("circle", { cx: xOf(y0), cy: yOf(0), r: 7, class: "start" }),
    );
  }
}

const xOf = (y) => SIDE / 2 + (Math.min(Math.max(y, -9), 9) / REACH) * (SIDE / 2 - EDGE);
const yOf = (y) => SIDE - xOf(y);

/** Up from (y0, 0) to the curve, across to the diagonal, and so on. */
const web = (ys) => ys.slice(1).flatMap((y, k) => [[xOf(ys[k]), yOf(k ? ys[k] : 0)], [xOf(ys[k]), yOf(y)], [xOf(y), yOf(y)]]);

function divergingBands(d) {
  const good = basin(d) ?? [REACH, REACH];
  const band = (from, to) => make("rect", { x: xOf(from), y: EDGE, width: Math.max(xOf(to) - xOf(from), 0), height: SIDE, class: "diverges" });
  return [band(-REACH, Math.max(good[0], -REACH)), band(Math.min(good[1], REACH), REACH)];
}

function frame() {
  const ticks = [-1, -0.5, 0.5, 1].flatMap((y) => [
    text(xOf(y), yOf(0) + 16, String(y), "tick", "middle"), line(xOf(y), yOf(0) - 3, xOf(y), yOf(0) + 3, "axis"),
    text(xOf(0) - 7, yOf(y) + 4, String(y), "tick", "end"), line(xOf(0) - 3, yOf(y), xOf(0) + 3, yOf(y), "axis"),
  ]);
  return [
    line(EDGE, yOf(0), SIDE - EDGE, yOf(0), "axis"), line(xOf(0), EDGE, xOf(0), SIDE - EDGE, "axis"), ...ticks,
    text(SIDE - EDGE + 4, yOf(0) + 4, "y", "tick"), text(xOf(0) + 8, EDGE - 8, "d + y⁵", "tick"),
  ];
}

function bisect(f, low, high) {
  for (let k = 0; k < 60; k++) {
    const middle = (low + high) / 2;
    if (f(low) * f(middle) <= 0) high = middle;
    else low = middle;
  }
  return (low + high) / 2;
}
