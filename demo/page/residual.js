// The residual chart: one line per solver over the steps, on a log axis, with the tolerance as a dashed line.

import { line, make, onDrag, points, text } from "./svg.js";

const HEIGHT = 196;
const EDGE = { left: 46, right: 78, top: 10, bottom: 26 };
const [LOW, HIGH] = [-7, 0]; // powers of ten; fixed, so that runs can be compared by eye
const SLOPE = (HEIGHT - EDGE.top - EDGE.bottom) / (HIGH - LOW); // pixels per power

const yOf = (residual) => EDGE.top + SLOPE * (HIGH - Math.min(Math.max(Math.log10(residual), LOW), HIGH));

export class ResidualChart {
  /** `onEps(power)` is called while the dashed line is dragged. */
  constructor(svg, onEps) {
    this.svg = svg;
    onDrag(svg, (_, y) => onEps(HIGH - (y - EDGE.top) / SLOPE));
    new ResizeObserver(() => this.content && this.draw(this.content)).observe(svg);
  }

  /** Draw the residuals of `runs`, one per solver. That of `solver` is emphasised, with a mark at `step`. */
  draw(content) {
    this.content = content;
    const { runs, solver, step, eps } = content;
    const right = this.svg.clientWidth - EDGE.right;
    const longest = Math.max(10, ...Object.values(runs).map(({ residuals }) => residuals.length));
    const xOf = (k) => EDGE.left + (k / longest) * (right - EDGE.left);
    this.svg.setAttribute("viewBox", `0 0 ${this.svg.clientWidth} ${HEIGHT}`);
    this.svg.replaceChildren(
      ...axes(xOf, longest, right),
      line(EDGE.left, yOf(eps), right, yOf(eps), "tolerance"),
      text(right + 8, yOf(eps) + 4, `ε = ${scientific(eps)}`, "accent"),
      ...Object.keys(runs).flatMap((name) => curve(name, runs[name].residuals, xOf, name === solver)),
      ...(step > 0 ? [mark(xOf(step), yOf(runs[solver].residuals[step - 1]))] : []),
    );
  }
}

const mark = (cx, cy) => make("circle", { cx, cy, r: 6, class: "now" });

function axes(xOf, longest, right) {
  const every = longest > 30 ? 10 : longest > 12 ? 5 : 2;
  const parts = [];
  for (let power = HIGH; power >= LOW; power -= 2) {
    parts.push(line(EDGE.left, yOf(10 ** power), right, yOf(10 ** power), "grid"));
    parts.push(text(EDGE.left - 8, yOf(10 ** power) + 4, scientific(10 ** power), "tick", "end"));
  }
  for (let k = 0; k <= longest; k += every) parts.push(text(xOf(k), HEIGHT - 8, String(k), "tick", "middle"));
  return [...parts, text(right + 8, HEIGHT - 8, "steps", "tick")];
}

/** One line with its name in the middle: Picard's above it, Anderson's below, since that line falls faster. */
function curve(name, residuals, xOf, chosen) {
  const kind = chosen ? "chosen" : "other";
  const places = residuals.map((residual, i) => [xOf(i + 1), yOf(residual)]);
  const dots = chosen ? places.map(([cx, cy]) => make("circle", { cx, cy, r: 2.5, class: kind })) : [];
  const [x, y] = places[Math.floor(places.length / 2)] ?? [0, 0];
  const above = name === "picard";
  const label = above ? text(x + 6, y - 8, "Picard", kind) : text(x - 6, y + 16, "Anderson", kind, "end");
  return [make("polyline", { points: points(places), class: kind }), ...dots, label];
}

/** Write 0.00018 as 1.8e-4, and 0.0001 as 1e-4. */
export function scientific(value) {
  const [digits, power] = value.toExponential(1).split("e");
  return `${digits.replace(".0", "")}e${Number(power)}`;
}
