// The latent as a mosaic of its channels. Positive values have the accent colour, negative ones that of the ink.

/** Draw a latent of shape [channels, height, width]; `scale` is the value that gets the full colour. */
export function drawMosaic(canvas, latent, [channels, height, width], scale) {
  const columns = Math.ceil(Math.sqrt(channels));
  const rows = Math.ceil(channels / columns);
  canvas.width = columns * (width + 1) - 1;
  canvas.height = rows * (height + 1) - 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const colours = palette(canvas);
  for (let channel = 0; channel < channels; channel++) {
    const left = (channel % columns) * (width + 1);
    const top = Math.floor(channel / columns) * (height + 1);
    for (let i = 0; i < height * width; i++) {
      const value = latent ? latent[channel * height * width + i] / scale : 0;
      const pixel = (top + Math.floor(i / width)) * canvas.width + left + (i % width);
      image.data.set(colour(value, colours), 4 * pixel);
    }
  }
  context.putImageData(image, 0, 0);
}

/** The value that only one in a hundred entries exceeds: one large entry does not darken the rest. */
export function typicalScale(latent) {
  const sizes = Float32Array.from(latent, Math.abs).sort();
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || 1;
}

function palette(element) {
  const style = getComputedStyle(element);
  const read = (name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number);
  return { zero: read("--zero-rgb"), positive: read("--accent-rgb"), negative: read("--ink-rgb") };
}

function colour(value, { zero, positive, negative }) {
  const full = value > 0 ? positive : negative;
  const share = Math.min(Math.abs(value), 1);
  return [...zero.map((low, i) => low + share * (full[i] - low)), 255];
}
