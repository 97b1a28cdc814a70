// The drawing area: white ink on black, by mouse, pen or touch.

const PEN = 22; // pixels of a canvas of 280: about the stroke of MNIST after scaling

export class Pad {
  /** `onChange()` is called after every stroke and every painted image. */
  constructor(canvas, onChange) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { willReadFrequently: true });
    this.onChange = onChange;
    this.clear();
    canvas.addEventListener("pointerdown", (event) => this.#begin(event));
    canvas.addEventListener("pointermove", (event) => this.#extend(event));
    canvas.addEventListener("pointerup", () => this.#end());
    canvas.addEventListener("pointercancel", () => this.#end());
  }

  clear() {
    this.painted = false;
    this.context.fillStyle = "black";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
  }

  /** Paint a square image with values from 0 to 1 over the whole area. */
  paint(values, size) {
    const small = new OffscreenCanvas(size, size);
    paintGrey(small.getContext("2d"), values, size);
    this.clear();
    this.context.imageSmoothingQuality = "high";
    this.context.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    this.painted = true;
    this.onChange();
  }

  /** The ink as values from 0 to 1, row by row. */
  ink() {
    const { data } = this.context.getImageData(0, 0, this.canvas.width, this.canvas.height);
    return Float32Array.from({ length: data.length / 4 }, (_, i) => data[4 * i] / 255);
  }

  #begin(event) {
    this.canvas.setPointerCapture(event.pointerId);
    if (this.painted) this.clear(); // nobody wants to draw over a sample
    this.last = this.#position(event);
    this.#extend(event);
  }

  #extend(event) {
    if (!this.last) return;
    const next = this.#position(event);
    Object.assign(this.context, { strokeStyle: "white", lineWidth: PEN, lineCap: "round" });
    this.context.beginPath();
    this.context.moveTo(...this.last);
    this.context.lineTo(...next);
    this.context.stroke();
    this.last = next;
  }

  #end() {
    if (!this.last) return;
    this.last = null;
    this.onChange();
  }

  #position(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
  }
}

/** Write a square image with values from 0 (black) to 1 (white). */
export function paintGrey(context, values, size) {
  const image = context.createImageData(size, size);
  values.forEach((value, i) => {
    image.data.set([255 * value, 255 * value, 255 * value, 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
}
