// Small helpers for the two charts, which are SVG so that they stay sharp and follow the colours of the page.

/** Return an SVG element with attributes and children, which may be text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const line = (x1, y1, x2, y2, kind) => make("line", { x1, y1, x2, y2, class: kind });

export function text(x, y, content, kind, anchor = "start") {
  return make("text", { x, y, class: kind, "text-anchor": anchor }, content);
}

/** Return "x,y x,y ..." for a polyline. */
export const points = (pairs) => pairs.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(2)}`).join(" ");

/** Call `move(x, y)`, in units of the viewBox, while the pointer is down. A touch that only scrolls is ignored. */
export function onDrag(svg, move) {
  const report = (event) => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    move(at.x, at.y);
  };
  svg.addEventListener("pointerdown", (event) => {
    svg.setPointerCapture(event.pointerId);
    if (event.pointerType !== "touch") report(event);
  });
  svg.addEventListener("pointermove", (event) => {
    if (svg.hasPointerCapture(event.pointerId)) report(event);
  });
}
