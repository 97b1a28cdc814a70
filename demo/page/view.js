// What the page shows of one step: the latent, the probabilities, the residuals; and playing the steps one by one.

import { drawMosaic, typicalScale } from "./mosaic.js";

const PLAY_MS = 2200; // for all steps together
const SHORTEST_MS = 60; // for one step

export class View {
  /** `element(id)` finds an element, `onEnd()` is called when the last step is shown or playing is stopped. */
  constructor(element, chart, { latent, samples }, onEnd) {
    Object.assign(this, { element, chart, shape: latent, onEnd, step: 0, timer: null });
    this.content = { runs: {}, solver: "picard", eps: 1 };
    element("bars").replaceChildren(...samples.map((_, digit) => bar(digit)));
  }

  /** Replace what is shown: `runs` by solver, the chosen `solver`, `eps`. */
  update(content) {
    Object.assign(this.content, content);
    this.show(Infinity);
  }

  get run() {
    return this.content.runs[this.content.solver];
  }

  get last() {
    return this.run ? this.run.iterates.length - 1 : 0;
  }

  /** Show the state after `step` steps of the chosen solver. */
  show(step = this.step) {
    const { element, run, last } = this;
    this.step = Math.min(step, last);
    Object.assign(element("step"), { max: last, value: this.step });
    element("step-text").textContent = `step ${this.step} of ${last}`;
    const scale = run ? typicalScale(run.iterates[last]) : 1; // of the last step, so that the steps compare
    drawMosaic(element("mosaic"), run?.iterates[this.step], this.shape, scale);
    this.#showBars(run?.probabilities[this.step]);
    this.chart.draw({ ...this.content, step: this.step });
  }

  #showBars(probabilities) {
    const best = probabilities ? probabilities.indexOf(Math.max(...probabilities)) : -1;
    this.element("answer").textContent = best < 0 ? "?" : String(best);
    [...this.element("bars").children].forEach((item, digit) => {
      const share = probabilities ? probabilities[digit] : 0;
      item.classList.toggle("best", digit === best);
      item.style.setProperty("--share", share);
      item.lastChild.textContent = `${(Math.floor(1000 * share) / 10).toFixed(1)}%`; // 99.96 is not 100
    });
  }

  /** Play the steps from `step` on, or show the last one where motion is not wanted. */
  play(step = 0) {
    clearTimeout(this.timer);
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.show(calm ? Infinity : step);
    if (this.step === this.last) return this.stop();
    this.element("play").textContent = "Pause";
    this.timer = setTimeout(() => this.play(this.step + 1), Math.max(PLAY_MS / this.last, SHORTEST_MS));
  }

  /** Stay at the step that is shown. */
  stop() {
    clearTimeout(this.timer);
    this.timer = null;
    this.element("play").textContent = "Play";
    this.onEnd();
  }

  /** Pause if the steps are played, else go on, or start again after the last one. */
  toggle() {
    if (this.timer) this.stop();
    else this.play(this.step < this.last ? this.step : 0);
  }
}

function bar(digit) {
  const item = document.createElement("li");
  item.innerHTML = `<span>${digit}</span><span class="track"></span><span class="value"></span>`;
  return item;
}
