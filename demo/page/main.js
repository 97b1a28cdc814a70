// Connects the page: drawing -> Q -> solve(T) by both solvers -> latents, probabilities, residuals of every step.

import { Network } from "./network.js";
import { Pad, paintGrey } from "./pad.js";
import { preprocess } from "./preprocess.js";
import { ResidualChart, scientific } from "./residual.js";
import { SOLVERS, rms, solve, subtract } from "./solve.js";
import { connectToy } from "./toy.js";
import { View } from "./view.js";

const MAX_STEPS = 60;
const FIRST = 2; // the sample that is shown at first
const element = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const eps = () => 10 ** Number(element("eps").value);
const setState = (state) => { document.body.dataset.state = state; };

class Demo {
  v = null; // Q of the drawing
  answer = null; // the latent that was found last
  starts = {}; // by the name of the start
  newest = 0; // number of the last request
  queue = Promise.resolve();

  constructor(network) {
    this.network = network;
    this.pad = new Pad(element("pad"), () => this.request(() => this.read()));
    const chart = new ResidualChart(element("residual"), (power) => this.setEps(power));
    this.view = new View(element, chart, network.about, () => setState(this.v ? "settled" : "ready"));
    this.clear();
  }

  /** Queue a computation and skip it if a newer one was asked for: a session of onnxruntime runs one at a time. */
  request(compute) {
    const number = ++this.newest;
    setState("busy");
    this.queue = this.queue.then(() => (number === this.newest ? compute() : undefined)).catch(report);
  }

  /** Read the drawing, solve from the chosen start, and play the steps. */
  async read() {
    const { network } = this;
    const image = preprocess(this.pad.ink(), this.pad.canvas.width, network.about);
    if (image === null) return this.clear();
    paintGrey(element("seen").getContext("2d"), image, network.about.size);
    const zeros = new Float32Array(network.latentSize);
    this.starts = { zeros, random: normal(zeros.length), previous: this.answer ?? zeros };
    document.querySelector("[value=previous]").disabled = this.answer === null;
    this.v = await network.Q(image);
    await this.solve();
    this.view.play();
  }

  /** Solve by every solver, and keep all iterates. */
  async solve() {
    if (this.v === null) return;
    const runs = {};
    for (const [name, solver] of Object.entries(SOLVERS)) {
      const limits = { eps: eps(), maxSteps: MAX_STEPS };
      const found = await solve(this.network.T(this.v), this.starts[chosen("start")], solver(), limits);
      runs[name] = { ...found, probabilities: await this.network.probabilities(found.iterates) };
    }
    this.answer = runs[chosen("solver")].iterates.at(-1);
    this.view.update({ runs, solver: chosen("solver"), eps: eps() });
    element("verdict").textContent = `Answer: ${element("answer").textContent}. ${verdict(runs)}`;
  }

  clear() {
    const { size } = this.network.about;
    this.v = null;
    this.pad.clear();
    paintGrey(element("seen").getContext("2d"), new Float32Array(size ** 2), size);
    this.view.update({ runs: {} });
    this.view.stop();
    element("verdict").textContent = "Draw a digit, or try a sample.";
  }

  /** Set the tolerance to a power of ten; the slider keeps it within its limits. */
  setEps(power) {
    element("eps").value = power;
    element("eps-text").textContent = scientific(eps());
    this.view.update({ eps: eps() });
    this.request(async () => {
      await this.solve();
      this.view.stop();
    });
  }

  connect() {
    const { view } = this;
    element("clear").addEventListener("click", () => this.request(() => this.clear()));
    element("eps").addEventListener("input", () => this.setEps(element("eps").value));
    element("play").addEventListener("click", () => view.toggle());
    element("step").addEventListener("input", () => {
      view.show(Number(element("step").value));
      view.stop();
    });
    onChange("solver", () => {
      view.update({ solver: chosen("solver") });
      view.play();
    });
    onChange("start", () => this.request(async () => {
      await this.solve();
      view.play();
    }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view.show());
  }
}

/** Compare the two solvers in a sentence. */
function verdict({ picard, anderson }) {
  const steps = ({ residuals, converged }) => `${converged ? "" : "above ε after "}${residuals.length} steps`;
  const fewer = picard.residuals.length - anderson.residuals.length;
  const gain = picard.converged && anderson.converged ? (fewer > 0 ? `, ${fewer} fewer` : ", not fewer") : "";
  const apart = scientific(rms(subtract(picard.iterates.at(-1), anderson.iterates.at(-1))));
  return `Picard: ${steps(picard)}. Anderson: ${steps(anderson)}${gain}. Their latents differ by ${apart}.`;
}

/** Independent normal numbers, by the Box-Muller transform. */
function normal(count) {
  const radius = () => Math.sqrt(-2 * Math.log(1 - Math.random()));
  return Float32Array.from({ length: count }, () => radius() * Math.cos(2 * Math.PI * Math.random()));
}

function onChange(name, act) {
  document.querySelectorAll(`input[name=${name}]`).forEach((input) => input.addEventListener("change", act));
}

/** Add one button per digit; pressing it again shows the next sample. */
function addSamples({ samples, size, peak }, pad) {
  element("samples").append(...samples.map((images, digit) => {
    const button = document.createElement("button");
    let presses = 0;
    Object.assign(button, { type: "button", textContent: digit, ariaLabel: `Sample of a ${digit}` });
    button.addEventListener("click", () => {
      const image = images[presses++ % images.length];
      pad.paint(image.map((value) => value / peak), size);
    });
    return button;
  }));
}

function describe({ title, accuracy, tested, parameters }) {
  const [images, weights] = [tested, parameters].map((count) => count.toLocaleString("en"));
  return `Trained by banach on ${title}: ${(100 * accuracy).toFixed(2)}% of ${images} test images right, `
    + `${weights} parameters.`;
}

function report(error) {
  console.error(error);
  element("about").textContent = `The network does not run here: ${error.message}`;
  setState("failed");
}

async function main() {
  connectToy(element);
  const network = await Network.load();
  element("about").textContent = describe(network.about);
  Object.assign(element("seen"), { width: network.about.size, height: network.about.size });
  const demo = new Demo(network);
  demo.connect();
  demo.setEps(element("eps").value);
  addSamples(network.about, demo.pad);
  element("samples").children[FIRST].click();
}

main().catch(report);
