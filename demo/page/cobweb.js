// The cobweb plot of an iteration y <- T(y): up to the curve, across to the diagonal, and so on.

import { line, make, onDrag, points, text } from "./svg.js";

const REACH = 1.25; // the plot shows -REACH to REACH
const SIDE = 420, EDGE = 26;
const INNER = SIDE - 2 * EDGE;

const xOf = (y) => SIDE / 2 + (Math.min(Math.max(y, -9), 9) / REACH) * (INNER / 2);
const yOf = (y) => SIDE - xOf(y);

export class Cobweb {
  /** `onStart(y0)` is called while the pointer drags over the plot. */
  constructor(svg, onStart) {
    this.svg = svg;
    svg.setAttribute("viewBox", `0 0 ${SIDE} ${SIDE}`);
    onDrag(svg, (x) => onStart(((x - SIDE / 2) / (INNER / 2)) * REACH));
  }

  /** Draw the map, its iterates, its fixed points, and shade the starts outside `good`, or all if it is null. */
  draw({ T, ys, roots, good }) {
    const curve = Array.from({ length: 161 }, (_, i) => (i / 80 - 1) * REACH);
    this.svg.replaceChildren(
      make("clipPath", { id: "inside" }, make("rect", { x: EDGE, y: EDGE, width: INNER, height: INNER })),
      ...axes(),
      make("g", { "clip-path": "url(#inside)" },
        ...shades(good),
        line(xOf(-REACH), yOf(-REACH), xOf(REACH), yOf(REACH), "diagonal"),
        make("polyline", { points: points(curve.map((y) => [xOf(y), yOf(T(y))])), class: "curve" }),
        make("polyline", { points: points(web(ys)), class: "web" }),
        ...roots.map(({ y, attracts }) => dot(y, y, attracts ? "attracts" : "repels"))),
      dot(ys[0], 0, "start"),
    );
  }
}

const dot = (x, y, kind) => make("circle", { cx: xOf(x), cy: yOf(y), r: 6, class: kind });

/** The corners of the cobweb, from (y0, 0) on. */
function web(ys) {
  const corners = ys.slice(1).flatMap((y, k) => [[ys[k], y], [y, y]]);
  return [[ys[0], 0], ...corners].map(([x, y]) => [xOf(x), yOf(y)]);
}

function shades(good) {
  const [low, high] = good ?? [REACH, REACH];
  return [[-REACH, low], [high, REACH]].map(([from, to]) => make("rect", {
    x: xOf(from), y: EDGE, width: Math.max(xOf(to) - xOf(from), 0), height: INNER, class: "diverges",
  }));
}

function axes() {
  const ticks = [-1, -0.5, 0.5, 1].flatMap((y) => [
    line(xOf(y), yOf(0) - 3, xOf(y), yOf(0) + 3, "axis"),
    text(xOf(y), yOf(0) + 16, String(y), "tick", "middle"),
    line(xOf(0) - 3, yOf(y), xOf(0) + 3, yOf(y), "axis"),
    text(xOf(0) - 7, yOf(y) + 4, String(y), "tick", "end"),
  ]);
  return [
    line(EDGE, yOf(0), SIDE - EDGE, yOf(0), "axis"),
    line(xOf(0), EDGE, xOf(0), SIDE - EDGE, "axis"),
    ...ticks,
    text(SIDE - EDGE + 4, yOf(0) + 4, "y", "tick"),
    text(xOf(0) + 8, EDGE - 8, "d + y⁵", "tick"),
  ];
}
