// The worker, a second thread that runs the model; model.js stands before this code. A message of
// the page starts a job, and ends the previous job of that name. A job calls `pause`, which lets
// messages in, and `report`, which answers the page.

const SLICE = 40; // milliseconds of computation between two pauses
const running = {}; // the number of the job of each name

let [config, weights, model, writer, inspector] = [];

const jobs = {
  load({ base64, shapes, config: settings }) {
    [config, weights] = [settings, decodeWeights(base64, shapes)];
    jobs.heads({ off: [] });
  },

  // Switch heads off, and all others on. Jobs that run keep their model, but for `write`.
  heads({ off }) {
    model = new GPT(config, weights, off);
    [writer, inspector] = [new Reader(model), new Reader(model)];
  },

  // Score the given characters from position `from` on, then draw more, up to position `end` or the
  // end of an answer, as fast as possible or, with `pace`, so many a second.
  async write({ ids, from, end, settings, pace, answer }, pause, report) {
    const given = ids.length;
    let [items, drawing, done] = [[], 0, false];
    for (let n = from; !done && n < end; n++) {
      if (n === given) drawing = performance.now();
      const logits = writer.read(ids, n);
      if (n >= given) ids.push(sample(logits, settings, uniform(settings.seed, n)));
      items.push({ id: ids[n], ...scoreCharacter(logits, ids[n]) });
      done = n + 1 >= end || (answer && n >= given && windowStartIn(ids, n + 1, config) === n);
      const paced = pace && n >= given;
      if (!(await pause(done || paced))) continue;
      const [drawn, seconds] = [Math.max(0, n + 1 - given), (performance.now() - drawing) / 1000];
      report({ from: n + 1 - items.length, items, done, rate: pace ? 0 : drawn / seconds });
      items = [];
      if (paced) await new Promise((resolve) => setTimeout(resolve, 1000 / pace));
    }
  },

  // Compute what the model attended to before character n of ids, and what each layer would have
  // predicted.
  async inspect({ ids, n }, pause, report) {
    const reader = inspector; // another may come during a pause
    const window = ids.slice(windowStartIn(ids, n, config), n);
    let known = 0; // the characters that the last window began with are read
    while (known < window.length - 1 && window[known] === reader.window[known]) known++;
    for (let length = known + 1; length <= window.length; length++) {
      await pause();
      reader.read(window, length);
    }
    const lens = reader.model.lens().map((logits) => scoreCharacter(logits, ids[n]));
    report({ window, attention: reader.model.attention, lens });
  },

  // Compare the model in the page with the one in Python.
  async check({ check }, pause, report) {
    let largest = 0;
    for (const difference of differences(new GPT(config, weights), check)) {
      largest = Math.max(largest, difference); // stays NaN
      await pause();
    }
    report({ difference: largest });
  },
};

// Return the function `pause(now)` of a job: at the end of a slice of time, or if `now`, it lets
// messages in and returns true. To a job that they have ended it never returns.
function pauses(job, number) {
  let began = performance.now();
  return async (now) => {
    if (!now && performance.now() - began < SLICE) return false;
    await new Promise((resolve) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => {
        port1.close();
        if (running[job] === number) resolve();
      };
      port2.postMessage(null);
    });
    began = performance.now();
    return true;
  };
}

onmessage = ({ data }) => {
  const { job, number, stop } = data;
  running[job] = number;
  const report = (result) => postMessage({ job, number, ...result });
  if (!stop) jobs[job](data, pauses(job, number), report);
};
onunhandledrejection = ({ reason }) => {
  throw reason; // calls the page's worker.onerror
};
