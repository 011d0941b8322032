// The mathematics of the page: the model, its sampling, its loss and its attention, for one text.
//
// A second implementation of model/gpt.py, model/generate.py and training/evaluate.py, one
// character at a time, as plain as possible. The tests compare the results.
// C n_embd, H n_head, D head size, S tokens so far, V characters in the vocabulary
"use strict";

const LAYERNORM_EPS = 1e-5;
const RMS_EPS = 2 ** -23; // the machine epsilon of float32
const GREEDY_BELOW = 1e-6; // temperatures below this are greedy
const LIKELIEST = 5; // characters that `scoreCharacter` returns

// ---------------------------------------------------------------------------------- the operations

// Return W x. W is (rows, columns), stored row by row. Four rows share each read of x.
function linear(x, weight) {
  const columns = x.length;
  const [y, last] = [new Float32Array(weight.length / columns), weight.length / columns - 1];
  for (let row = 0; row <= last; row += 4) {
    const second = Math.min(row + 1, last);
    const third = Math.min(row + 2, last);
    const fourth = Math.min(row + 3, last);
    let [a, b, c, d] = [0, 0, 0, 0];
    for (let i = 0; i < columns; i++) {
      a += weight[row * columns + i] * x[i];
      b += weight[second * columns + i] * x[i];
      c += weight[third * columns + i] * x[i];
      d += weight[fourth * columns + i] * x[i];
    }
    [y[row], y[second], y[third], y[fourth]] = [a, b, c, d];
  }
  return y;
}

function add(x, y) {
  for (let i = 0; i < x.length; i++) x[i] += y[i];
}

function argmax(values) {
  let best = 0;
  for (let i = 1; i < values.length; i++) if (values[i] > values[best]) best = i;
  return best;
}

// Scale `size` numbers of x, starting at `start`, to a root mean square of 1, in place.
function rmsNorm(x, eps, start = 0, size = x.length) {
  let squares = 0;
  for (let i = start; i < start + size; i++) squares += x[i] * x[i];
  const scale = 1 / Math.sqrt(squares / size + eps);
  for (let i = start; i < start + size; i++) x[i] *= scale;
}

// Subtract the mean of x and divide by its standard deviation, in place.
function layerNorm(x, eps) {
  const mean = x.reduce((sum, value) => sum + value, 0) / x.length;
  for (let i = 0; i < x.length; i++) x[i] -= mean;
  rmsNorm(x, eps);
}

// Turn scores into weights that sum to 1, in place; return the logarithm of the sum of exp(score).
function softmax(x) {
  const max = x[argmax(x)];
  let sum = 0;
  for (let i = 0; i < x.length; i++) sum += x[i] = Math.exp(x[i] - max);
  for (let i = 0; i < x.length; i++) x[i] /= sum;
  return max + Math.log(sum);
}

// Rotate each pair (i, i + D/2) of every head by the angle of the position, in place (RoPE).
function rotate(x, D, position) {
  for (let i = 0; i < D / 2; i++) {
    const angle = position * 10000 ** ((-2 * i) / D);
    const [cos, sin] = [Math.fround(Math.cos(angle)), Math.fround(Math.sin(angle))];
    for (let first = i; first < x.length; first += D) {
      const [a, b] = [x[first], x[first + D / 2]];
      x[first] = a * cos - b * sin;
      x[first + D / 2] = b * cos + a * sin;
    }
  }
}

// The error function, by a series of positive terms (Abramowitz and Stegun 1964, 7.1.6).
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let [sum, term] = [x, x];
  for (let n = 1; Math.abs(term) > 1e-9 * Math.abs(sum); n++) {
    sum += term *= (2 * x * x) / (2 * n + 1);
  }
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));
const relu2 = (x) => Math.max(x, 0) ** 2;

// --------------------------------------------------------------------------------------- the model

// Decode base64 into one Float32Array per parameter; `shapes` is a list of [name, shape].
function decodeWeights(base64, shapes) {
  const { buffer } = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0)); // little-endian
  const numbers = new Float32Array(buffer);
  let start = 0;
  return Object.fromEntries(
    shapes.map(([name, shape]) => {
      const size = shape.reduce((a, b) => a * b, 1);
      return [name, numbers.subarray(start, (start += size))];
    }),
  );
}

class GPT {
  // `config` has the settings of ModelConfig, `weights` a Float32Array for each parameter name, and
  // `off` the heads that are switched off, each as layer * H + head.
  constructor(config, weights, off = []) {
    this.config = config;
    this.weights = weights;
    this.off = new Set(off);
    this.attention = []; // [layer * H + head]: the S attention weights of a head in the last step
    this.streams = []; // [layer]: the residual stream (C) after a block in the last step
  }

  newCaches() {
    return Array.from({ length: this.config.n_layer }, () => ({ keys: [], values: [] }));
  }

  // Read the token at `position`; the caches hold those before it. Return the next logits (V).
  step(ids, position, caches) {
    const { config } = this;
    // sum of embeddings: of the token, of the previous tokens, of the position
    const x = this.row("token_embedding", ids[position]).slice(); // (C), the residual stream
    for (let n = 1; n <= Math.min(config.n_previous, position); n++)
      add(x, this.row(`previous_embeddings.${n - 1}`, ids[position - n]));
    if (config.positions === "learned") add(x, this.row("position_embedding", position));
    for (let layer = 0; layer < config.n_layer; layer++) {
      const block = `blocks.${layer}`;
      add(x, this.attend(this.norm(x, `${block}.attn_norm`), layer, position, caches[layer]));
      add(x, this.mlp(this.norm(x, `${block}.mlp_norm`), `${block}.mlp`));
      this.streams[layer] = x.slice();
    }
    return this.logits(x);
  }

  // Read the residual stream (C) as the last layers do: return logits (V).
  logits(x) {
    const { lm_head: matrix, token_embedding: tied } = this.weights;
    const logits = linear(this.norm(x, "final_norm"), matrix || tied);
    const cap = this.config.logit_softcap;
    return cap ? logits.map((logit) => cap * Math.tanh(logit / cap)) : logits;
  }

  // Return the logits (V) that each block's residual stream gives in the last step (nostalgebraist
  // 2020, the logit lens). Those of the last block are the model's.
  lens() {
    return this.streams.map((x) => this.logits(x));
  }

  row(name, index) {
    const size = this.config.n_embd;
    return this.weights[name].subarray(index * size, (index + 1) * size);
  }

  linear(x, name) {
    return linear(x, this.weights[name]);
  }

  norm(x, name) {
    const [weight, y] = [this.weights[name], x.slice()];
    if (this.config.norm === "layernorm") layerNorm(y, LAYERNORM_EPS);
    else rmsNorm(y, RMS_EPS);
    return y.map((value, i) => value * weight[i]);
  }

  // Multi-head attention: in each head, a softmax of q . k / sqrt(D) weights the values.
  attend(x, layer, position, { keys, values }) {
    const { n_embd: C, n_head: H, qk_norm, positions } = this.config;
    const [D, S, name] = [C / H, position + 1, `blocks.${layer}.attention`];
    const qkv = this.linear(x, `${name}.qkv`); // the weight is (3, H, D, C)
    const [q, k, v] = [0, C, 2 * C].map((start) => qkv.slice(start, start + C));
    for (const vector of [q, k]) {
      if (qk_norm) for (let start = 0; start < C; start += D) rmsNorm(vector, RMS_EPS, start, D);
      if (positions === "rope") rotate(vector, D, position);
    }
    [keys[position], values[position]] = [k, v];
    const y = new Float32Array(C);
    for (let head = 0; head < H; head++) {
      const [row, start, end] = [new Float32Array(S), head * D, (head + 1) * D];
      for (let s = 0; s < S; s++) {
        const key = keys[s];
        let score = 0;
        for (let i = start; i < end; i++) score += q[i] * key[i];
        row[s] = score / Math.sqrt(D);
      }
      softmax(row);
      this.attention[layer * H + head] = row;
      if (this.off.has(layer * H + head)) continue; // its part of y stays 0
      for (let s = 0; s < S; s++) {
        const [value, weight] = [values[s], row[s]];
        for (let i = start; i < end; i++) y[i] += weight * value[i];
      }
    }
    return this.linear(y, `${name}.out_proj`);
  }

  mlp(x, name) {
    const hidden = this.linear(x, `${name}.up`).map(this.config.activation === "gelu" ? gelu : relu2);
    return this.linear(hidden, `${name}.down`);
  }
}

// ------------------------------------------------------------------------------------- a long text

// Return the start of the window in a text of n characters: the smallest multiple of half a context
// from which the rest of the text fits (`window_start` in model/generate.py).
function windowStart(n, blockSize) {
  const hop = Math.max(1, Math.floor(blockSize / 2));
  return Math.max(0, Math.ceil((n - blockSize) / hop) * hop);
}

// Return the start of the window in the first n ids of a text. A list begins with the end of a
// separator; its window is that of the last item and of the character before it.
function windowStartIn(ids, n, { block_size: blockSize, separator = [] }) {
  let begin = 0;
  for (let end = 1 + separator.length; separator.length && end <= n; end++) {
    if (!separator.every((id, k) => id === ids[end - separator.length + k])) continue;
    begin = end - 1;
    end = begin + separator.length; // separators do not overlap
  }
  return begin + windowStart(n - begin, blockSize);
}

// A model and the caches of the last window. The next window reuses the part that has not changed.
class Reader {
  constructor(model) {
    this.model = model;
    this.start = 0; // position of the window in the text
    this.window = []; // the ids that are in the caches
    this.caches = model.newCaches();
  }

  // Return the logits (V) of the character after the first n ids (n >= 1).
  read(ids, n) {
    const start = windowStartIn(ids, n, this.model.config);
    const window = ids.slice(start, n);
    let [position, logits] = [0, null];
    if (start === this.start) {
      while (position < window.length - 1 && window[position] === this.window[position]) position++;
    }
    [this.start, this.window] = [start, window];
    for (; position < window.length; position++) {
      logits = this.model.step(window, position, this.caches);
    }
    return logits;
  }
}

// Read the window ids[start] to ids[end - 1]; yield [n, logits] for each n: those after n ids.
function* readWindow(model, ids, start, end) {
  const [window, caches] = [ids.slice(start, end), model.newCaches()];
  for (let i = 0; i < window.length; i++) yield [start + i + 1, model.step(window, i, caches)];
}

// Compare the logits with those that Python computed from the same weights: `check` has ids, and
// [n, logits] for some n. Yield the difference after each step, in units of the largest logit, or
// of 1 if all are smaller; 0 where there is nothing to compare.
function* differences(model, { ids, logits }) {
  const largest = (values, least) => values.reduce((most, x) => Math.max(most, Math.abs(x)), least);
  for (const [n, expected] of logits) {
    const start = windowStart(n, model.config.block_size); // of these ids, which are no list
    for (const [m, found] of readWindow(model, ids, start, n)) {
      yield m === n ? largest(expected.map((x, i) => x - found[i]), 0) / largest(expected, 1) : 0;
    }
  }
}

// Score a character by the logits at its position: return its loss in nats, its rank (1: the
// likeliest) and `top`, the likeliest characters at this position, as [id, probability].
function scoreCharacter(logits, id) {
  const probs = Float64Array.from(logits);
  const nats = softmax(probs) - logits[id];
  const rank = 1 + probs.filter((p) => p > probs[id]).length;
  const [left, top] = [probs.slice(), []];
  while (top.length < Math.min(LIKELIEST, probs.length)) {
    const best = argmax(left);
    top.push([best, probs[best]]);
    left[best] = -1;
  }
  return { nats, rank, top };
}

// ---------------------------------------------------------------------------------------- sampling

// Draw an id from logits, as `Sampler` in model/generate.py does; u is a uniform number in [0, 1).
function sample(logits, settings, u) {
  if (settings.temperature < GREEDY_BELOW) return argmax(logits);
  let total = 0;
  const cumulative = unnormalizedProbs(logits, settings).map((p) => (total += p));
  return cumulative.findIndex((sum) => sum >= (1 - u) * total);
}

// Return the probabilities (V) after the filters, in float64, scaled so that the largest is 1.
function unnormalizedProbs(logits, { temperature, top_k, top_p, min_p }) {
  const [V, max] = [logits.length, logits[argmax(logits)]];
  const scaled = Float64Array.from(logits, (logit) => (logit - max) / temperature);
  const kth = top_k > 0 && top_k < V ? scaled.slice().sort()[V - top_k] : -Infinity;
  const probs = scaled.map((value) => (value < kth ? 0 : Math.exp(value))); // keeps ties with kth
  if (top_p < 1) {
    const ascending = Array.from(probs.keys()).sort((a, b) => probs[a] - probs[b] || a - b);
    let total = 0;
    const cumulative = ascending.map((id) => (total += probs[id]));
    ascending.pop(); // the likeliest is always kept
    ascending.forEach((id, i) => (probs[id] *= cumulative[i] > (1 - top_p) * total));
  }
  return probs.map((p) => (p < min_p ? 0 : p));
}

// Return a uniform number in [0, 1) for position n of the text of a seed: a hash of both.
function uniform(seed, n) {
  let hash = Math.imul(seed ^ Math.imul(n + 1, 0x9e3779b9), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 15), hash | 1);
  hash ^= hash + Math.imul(hash ^ (hash >>> 7), hash | 61);
  return ((hash ^ (hash >>> 14)) >>> 0) / 2 ** 32;
}
