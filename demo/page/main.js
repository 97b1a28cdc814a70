// Connects the parts of the page: drawing -> Q -> solve(T) by both solvers -> latent, probabilities and residuals of every step.

import { Cobweb, basin, fixedPoints, iterate } from "./cobweb.js";
import { drawMosaic, typicalScale } from "./mosaic.js";
import { Network } from "./network.js";
import { Pad, paintGrey } from "./pad.js";
import { preprocess } from "./preprocess.js";
import { ResidualChart, scientific } from "./residual.js";
import { SOLVERS, rms, solve, subtract } from "./solve.js";

const MAX_STEPS = 60;
const PLAY_MS = 2200; // for all steps together
const element = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

// What is shown. `runs` has, by solver, what solve() returned and the probabilities of every iterate.
const shown = { v: null, runs: {}, step: 0, answer: null, previous: null, random: null };
let network, pad, chart, timer, newest = 0, queue = Promise.resolve();

const run = () => shown.runs[chosen("solver")];
const eps = () => 10 ** Number(element("eps").value);

// Compute ----------------------------------------------------------------------------------------------------------

/** Queue a computation; one that a newer request has overtaken is skipped. Sessions of onnxruntime run one at a time. */
function request(compute) {
  const number = ++newest;
  document.body.dataset.state = "busy";
  queue = queue.then(() => (number === newest ? compute() : undefined)).catch(report);
}

async function readDrawing() {
  const image = preprocess(pad.ink(), pad.canvas.width, network.about);
  if (image === null) return reset();
  paintGrey(element("seen").getContext("2d"), image, network.about.size);
  shown.previous = shown.answer;
  shown.random = normal(network.latentSize);
  shown.v = await network.Q(image);
  element("network").querySelector("[value=previous]").disabled = shown.previous === null;
  await solveBoth();
  play();
}

/** Solve by every solver from the chosen start, and keep all iterates. */
async function solveBoth() {
  if (shown.v === null) return;
  const zeros = new Float32Array(network.latentSize);
  const start = { zeros, random: shown.random, previous: shown.previous ?? zeros }[chosen("start")];
  const runs = {};
  for (const [name, solver] of Object.entries(SOLVERS)) {
    const found = await solve(network.T(shown.v), start, solver(), { eps: eps(), maxSteps: MAX_STEPS });
    runs[name] = { ...found, probabilities: await network.probabilities(found.iterates) };
  }
  shown.runs = runs;
  shown.answer = run().iterates.at(-1);
  show(Infinity);
  element("verdict").textContent = verdict(runs);
}

function reset() {
  Object.assign(shown, { v: null, runs: {}, step: 0 });
  paintGrey(element("seen").getContext("2d"), new Float32Array(network.about.size ** 2), network.about.size);
  element("verdict").textContent = "Draw a digit, or try a sample.";
  show(0);
  document.body.dataset.state = "ready";
}

function verdict({ picard, anderson }) {
  const steps = ({ residuals, converged }) => (converged ? `${residuals.length} steps` : `above ε after ${residuals.length} steps`);
  const fewer = picard.residuals.length - anderson.residuals.length;
  const gain = anderson.converged && picard.converged ? (fewer > 0 ? `, ${fewer} fewer` : ", not fewer") : "";
  const apart = rms(subtract(picard.iterates.at(-1), anderson.iterates.at(-1)));
  const best = element("answer").textContent;
  return `Answer: ${best}. Picard: ${steps(picard)}. Anderson: ${steps(anderson)}${gain}. Their latents differ by ${scientific(apart)}.`;
}

/** Independent normal numbers, by the Box-Muller transform. */
function normal(count) {
  const angle = () => Math.cos(2 * Math.PI * Math.random());
  return Float32Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(1 - Math.random())) * angle());
}

// Show -------------------------------------------------------------------------------------------------------------

/** Show the state after `step` steps of the chosen solver. */
function show(step) {
  const current = run();
  const last = current ? current.iterates.length - 1 : 0;
  shown.step = Math.min(step, last);
  Object.assign(element("step"), { max: last, value: shown.step });
  element("step-text").textContent = `step ${shown.step} of ${last}`;
  const scale = current ? typicalScale(current.iterates[last]) : 1; // of the last step, so that the steps compare
  drawMosaic(element("mosaic"), current?.iterates[shown.step], network.about.latent, scale);
  showBars(current?.probabilities[shown.step]);
  showChart();
}

function showChart() {
  const runs = Object.fromEntries(Object.entries(shown.runs).map(([name, found]) => [name, found.residuals]));
  chart.draw({ runs, chosen: chosen("solver"), step: shown.step, eps: eps() });
}

function showBars(probabilities) {
  const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
  element("answer").textContent = best < 0 ? "?" : String(best);
  [...element("bars").children].forEach((bar, k) => {
    const share = probabilities ? probabilities[k] : 0;
    bar.classList.toggle("best", k === best);
    bar.style.setProperty("--share", share);
    bar.querySelector(".value").textContent = `${(Math.floor(1000 * share) / 10).toFixed(1)}%`; // 99.96 is not 100
  });
}

/** Play the steps of the chosen solver, or show the last one where motion is not wanted. */
function play(from = 0) {
  pause();
  const last = run()?.iterates.length - 1;
  if (calm.matches || !last) {
    show(Infinity);
    return settle();
  }
  document.body.dataset.state = "playing";
  element("play").textContent = "Pause";
  const tick = (step) => {
    show(step);
    if (step >= last) return settle();
    timer = setTimeout(() => tick(step + 1), Math.max(PLAY_MS / last, 60));
  };
  tick(from);
}

function pause() {
  clearTimeout(timer);
  timer = null;
  element("play").textContent = "Play";
}

function settle() {
  pause();
  document.body.dataset.state = "settled";
}

function report(error) {
  element("verdict").textContent = `This does not work here: ${error.message}`;
  document.body.dataset.state = "failed";
  throw error;
}

// Controls ---------------------------------------------------------------------------------------------------------

function connectNetwork() {
  pad = new Pad(element("pad"), () => request(readDrawing));
  chart = new ResidualChart(element("residual"), (power) => setRange("eps", power));
  const again = (then) => request(async () => {
    await solveBoth();
    then();
  });
  element("clear").addEventListener("click", () => {
    pause();
    pad.clear();
    request(reset);
  });
  element("eps").addEventListener("input", () => {
    pause();
    showEps();
    again(settle);
  });
  document.querySelectorAll("input[name=start]").forEach((input) => input.addEventListener("change", () => again(play)));
  document.querySelectorAll("input[name=solver]").forEach((input) => input.addEventListener("change", () => play()));
  element("step").addEventListener("input", () => {
    settle();
    show(Number(element("step").value));
  });
  element("play").addEventListener("click", () => {
    if (timer) settle();
    else play(shown.step < run()?.iterates.length - 1 ? shown.step : 0);
  });
  dark.addEventListener("change", () => show(shown.step));
}

function showEps() {
  element("eps-text").textContent = scientific(eps());
  showChart();
}

/** Set a slider from a drag on a chart, as if it had been moved itself. */
function setRange(id, value) {
  element(id).value = value;
  element(id).dispatchEvent(new Event("input"));
}

function addSamples({ samples, size, peak }) {
  element("samples").append(...samples.map((images, label) => {
    const button = document.createElement("button");
    let next = 0;
    Object.assign(button, { type: "button", textContent: label, ariaLabel: `Sample of a ${label}` });
    button.addEventListener("click", () => pad.paint(images[next++ % images.length].map((value) => value / peak), size));
    return button;
  }));
}

function addBars(classes) {
  for (let k = 0; k < classes; k++) {
    const bar = document.createElement("li");
    bar.innerHTML = `<span class="digit">${k}</span><span class="track"></span><span class="value"></span>`;
    element("bars").append(bar);
  }
}

function connectToy() {
  const [d, y0] = [element("d"), element("y0")];
  const cobweb = new Cobweb(element("cobweb"), (value) => setRange("y0", value));
  const draw = () => {
    cobweb.draw(Number(d.value), Number(y0.value));
    for (const input of [d, y0]) element(`${input.id}-text`).textContent = Number(input.value).toFixed(2);
    element("toy-verdict").textContent = toyVerdict(Number(d.value), Number(y0.value));
  };
  for (const input of [d, y0]) input.addEventListener("input", draw);
  draw();
}

function toyVerdict(d, y0) {
  const { ys, outcome } = iterate(d, y0);
  const good = basin(d);
  const limits = good ? `Starts between ${good[0].toFixed(3)} and ${good[1].toFixed(3)} converge.` : "For this d every start diverges.";
  if (outcome === "diverged") return `Diverges. ${limits}`;
  const { y, slope } = fixedPoints(d).find(({ attracts }) => attracts);
  const steps = outcome === "converged" ? `Converges in ${ys.length - 1} steps` : `Still moving after ${ys.length - 1} steps`;
  return `${steps} to y* = ${y.toFixed(4)}, where the slope is ${slope.toFixed(2)}. ${limits}`;
}

async function main() {
  connectToy();
  network = await Network.load();
  const { title, accuracy, tested, parameters, size } = network.about;
  element("about").textContent = `Trained by banach on ${title}: ${(100 * accuracy).toFixed(2)}% right on `
    + `${tested.toLocaleString("en")} test images, ${parameters.toLocaleString("en")} parameters.`;
  Object.assign(element("seen"), { width: size, height: size });
  addSamples(network.about);
  addBars(network.about.samples.length);
  connectNetwork();
  showEps();
  reset();
  document.querySelector("#samples button:nth-child(3)").click(); // something to look at
}

main().catch((error) => {
  element("about").textContent = `The network could not be loaded: ${error.message}`;
  throw error;
});
