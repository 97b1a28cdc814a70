// The network in the browser: Q, one step of R, and S are three ONNX files, run by onnxruntime-web.

import * as ort from "./runtime/ort.wasm.bundle.min.mjs";

ort.env.wasm.numThreads = 1; // threads need headers that isolate the page, and a step takes a millisecond
ort.env.wasm.wasmPaths = { wasm: new URL("./runtime/ort-wasm-simd-threaded.wasm", import.meta.url).href };

export class Network {
  /** Load network.json and the three files from the folder of the page. */
  static async load() {
    const about = await (await fetch("network.json")).json();
    const open = (name) => ort.InferenceSession.create(`${name}.onnx`);
    return new Network(about, await open("Q"), await open("R"), await open("S"));
  }

  constructor(about, Q, R, S) {
    Object.assign(this, { about, parts: { Q, R, S } });
    this.latentSize = about.latent.reduce((product, n) => product * n, 1);
  }

  /** Q(d) of an image with values from 0 to 1. */
  async Q(image) {
    const { mean, std, size, peak } = this.about;
    const d = Float32Array.from(image, (value) => ((value * peak) / 255 - mean) / std);
    return this.#run("Q", [new ort.Tensor("float32", d, [1, 1, size, size])]);
  }

  /** The map u -> R(u, v). */
  T(v) {
    return (u) => this.#run("R", [this.#latents([u]), this.#latents([v])]);
  }

  /** The probabilities of every latent, by softmax of S. */
  async probabilities(latents) {
    const scores = await this.#run("S", [this.#latents(latents)]);
    const classes = scores.length / latents.length;
    return latents.map((_, k) => softmax(scores.slice(k * classes, (k + 1) * classes)));
  }

  #latents(list) {
    const all = new Float32Array(list.length * this.latentSize);
    list.forEach((latent, k) => all.set(latent, k * this.latentSize));
    return new ort.Tensor("float32", all, [list.length, ...this.about.latent]);
  }

  async #run(name, inputs) {
    const session = this.parts[name];
    const feeds = Object.fromEntries(session.inputNames.map((input, k) => [input, inputs[k]]));
    const outputs = await session.run(feeds);
    return outputs[session.outputNames[0]].data;
  }
}

function softmax(scores) {
  const largest = Math.max(...scores);
  const powers = Array.from(scores, (score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / sum);
}
