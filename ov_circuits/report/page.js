'use strict';
/* The dashboard page of ov_circuits. No framework, no build step, no request.
 *
 * Order of the file: data blocks, numbers and text, colour, the document, the filter language, parts (map, strips, bars,
 * heat maps, charts), views (atlas, head, prompt, compare), and the router that shows one view at a time.
 *
 * Two rules keep it safe: `h` is the only way into the document and it makes text nodes of strings, never markup; and text that
 * plotly draws goes through `plotlyText`, because plotly reads a pseudo-HTML of its own.
 */
(() => {

// ---------------------------------------------------------------------------------------------------------------- data blocks

const documentRead = new Promise((done) => {
  if (document.readyState !== 'loading') done();
  else document.addEventListener('DOMContentLoaded', () => done());
});

async function blockBytes(name) {
  const id = `block-${name}`;
  if (!document.getElementById(id)) await documentRead;
  const element = document.getElementById(id);
  const binary = atob(element.textContent);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).arrayBuffer();
}

const blockText = async (name) => new TextDecoder().decode(await blockBytes(name));

/** Calls `make` once, and hands the same promise to everyone after. */
function once(make) {
  let made = null;
  return () => (made ??= make());
}

function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const arrayBuffers = new Map();

/** Row `index` of the first axis of an array of the payload, as numbers. */
async function arrayRow(spec, index) {
  if (!arrayBuffers.has(spec.block)) arrayBuffers.set(spec.block, blockBytes(spec.block));
  const buffer = await arrayBuffers.get(spec.block);
  const size = spec.shape.slice(1).reduce((a, b) => a * b, 1);
  const scale = spec.scale ?? 1;
  if (spec.dtype === 'f4') return new Float32Array(buffer, index * size * 4, size).map((v) => v * scale);
  if (spec.dtype === 'u1') return Float32Array.from(new Uint8Array(buffer, index * size, size), (v) => v * scale);
  const words = new Uint16Array(buffer, index * size * 2, size);
  const read = spec.dtype === 'f2' ? halfToNumber : (v) => v;
  return Float32Array.from(words, (v) => read(v) * scale);
}

// ------------------------------------------------------------------------------------------------------------ numbers and text

const MINUS = '\u2212';
const isNumber = (v) => typeof v === 'number' && Number.isFinite(v);

/** A number in the digits that a reader can use: 0.831, 12.4, 1 204, 3.1 × 10⁻⁷. */
function format(value, { sign = false, digits = 3 } = {}) {
  if (!isNumber(value)) return '–';
  const size = Math.abs(value);
  let text;
  if (size === 0) text = '0';
  else if (size < 1e-3 || size >= 1e6) {
    const [mantissa, exponent] = size.toExponential(Math.max(0, digits - 2)).split('e');
    const raised = [...String(Number(exponent))].map((c) => (c === '-' ? '⁻' : '⁰¹²³⁴⁵⁶⁷⁸⁹'[c])).join('');
    text = `${mantissa} × 10${raised}`;
  } else {
    const before = size >= 1 ? Math.floor(Math.log10(size)) + 1 : 0;
    text = size.toFixed(size < 0.1 ? digits : Math.max(0, digits - Math.max(1, before)));
    if (size >= 1000) text = text.replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');
  }
  if (value < 0 && !/^[0.]*$/.test(text)) return MINUS + text;
  return sign && value > 0 ? `+${text}` : text;
}

/** Numbers of one column share their decimals, three digits for the largest, so that they can be compared at a glance. */
function formatIn(scale, value, { sign = scale.diverging, more = 0 } = {}) {
  if (!isNumber(value)) return '–';
  const reach = Math.max(Math.abs(scale.lo), Math.abs(scale.hi));
  if (reach < 1e-3 || reach >= 1e5) return format(value, { sign });
  const text = Math.abs(value).toFixed(Math.min(5, Math.max(reach < 1000 ? 1 : 0, 2 + more - Math.floor(Math.log10(reach)))));
  if (/^[0.]*$/.test(text)) return text;
  const spaced = reach >= 1000 ? text.replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f') : text;
  return value < 0 ? MINUS + spaced : sign ? `+${spaced}` : spaced;
}

const percent = (share) => (share < 0.01 && share > 0 ? '< 1\u202f%' : `${Math.round(share * 100)}\u202f%`);
const plural = (n, one, many = `${one}s`) => `${format(n, { digits: 1 })} ${n === 1 ? one : many}`;
const wholeNumber = (n) => String(n).replace(/\B(?=(\d{3})+(?!\d))/g, '\u202f');

const NAMED_MARKS = new Map([
  [' ', '·'], ['\n', '↵'], ['\t', '⇥'], ['\r', 'CR'], ['\u007f', 'DEL'], ['\ufffd', '\ufffd'], ['\u00a0', 'NBSP'],
]);
// Format, private, unassigned and surrogate characters, separators, and the variation selectors: nothing of them shows by itself.
const UNSEEN = /[\p{C}\p{Z}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0]/u;
const EMOJI = /\p{Extended_Pictographic}/u;

/** The visible mark that stands for a character which does not show, or null when the character shows. */
function markFor(character, inEmoji) {
  const named = NAMED_MARKS.get(character);
  if (named) return named;
  const code = character.codePointAt(0);
  if (inEmoji && (code === 0x200d || code === 0xfe0f)) return null;
  if (!UNSEEN.test(character)) return null;
  // Python's surrogateescape: a byte that is no text by itself.
  if (code >= 0xdc80 && code <= 0xdcff) return `x${(code - 0xdc00).toString(16).toUpperCase()}`;
  return `U+${code.toString(16).toUpperCase().padStart(4, '0')}`;
}

/** A token as runs of `{text, mark}`: marks are ours, the rest is the token's. */
function tokenRuns(token) {
  if (token === '') return [{ text: '∅', mark: true }];
  const inEmoji = EMOJI.test(token);
  const runs = [];
  let first = true;
  for (const character of token) {
    const mark = markFor(character, inEmoji);
    if (mark === null && first && /\p{M}/u.test(character)) runs.push({ text: '◌', mark: true });
    first = false;
    const last = runs.at(-1);
    if (mark !== null) runs.push({ text: mark, mark: true });
    else if (last && !last.mark) last.text += character;
    else runs.push({ text: character, mark: false });
  }
  return runs;
}

const tokenText = (token) => tokenRuns(token).map((run) => run.text).join('');
const clip = (text, length) => {
  const characters = [...text];
  return characters.length > length ? `${characters.slice(0, length - 1).join('')}…` : text;
};

/** Plotly takes `<b>`, `<br>` and entities in labels for markup. This is the only road of text into a chart. */
const plotlyText = (text) => text.replace(/&/g, '&amp;').replace(/</g, '&lt;').replace(/>/g, '&gt;');

// ---------------------------------------------------------------------------------------------------------------------- colour

function cssColour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
}

const toLinear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const fromLinear = (c) => (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);

/* Colours are mixed in Oklab (Ottosson 2020), where equal steps look equal. */
function toOklab(rgb) {
  const [r, g, b] = rgb.map(toLinear);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((c) => Math.min(1, Math.max(0, fromLinear(Math.min(1, Math.max(0, c))))));
}

const luminance = (rgb) => {
  const [r, g, b] = rgb.map(toLinear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

const RAMP_STEPS = 128;

/** 2 * 128 + 1 colours from the stops in the style sheet, each with the ink (black or white) that reads best on it. */
function makeRamp(names) {
  const stops = names.map((name) => toOklab(cssColour(name)));
  return Array.from({ length: 2 * RAMP_STEPS + 1 }, (_, i) => {
    const at = (i / (2 * RAMP_STEPS)) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(at));
    const rgb = fromOklab(stops[low].map((v, k) => v + (stops[low + 1][k] - v) * (at - low)));
    const bytes = rgb.map((c) => Math.round(c * 255));
    const light = luminance(rgb);
    return { css: `rgb(${bytes.join(' ')})`, bytes, ink: 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? '#ffffff' : '#000000' };
  });
}

let ramps = null;
const currentRamps = () => (ramps ??= {
  diverging: makeRamp(['--diverging-1', '--diverging-2', '--diverging-3', '--diverging-4', '--diverging-5']),
  sequential: makeRamp(['--sequential-1', '--sequential-2', '--sequential-3', '--sequential-4']),
});

/** Maps values to colours. A diverging scale is centred on zero, whatever the data. */
function makeScale(low, high, diverging) {
  const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const [lo, hi] = diverging ? [-reach, reach] : [low, high > low ? high : low + 1];
  const at = (value) => {
    const share = Math.min(1, Math.max(0, (value - lo) / (hi - lo)));
    return currentRamps()[diverging ? 'diverging' : 'sequential'][Math.round(share * 2 * RAMP_STEPS)];
  };
  return { lo, hi, diverging, at };
}

function scaleOf(values, diverging, range = null) {
  if (range && isNumber(range[0]) && isNumber(range[1])) return makeScale(range[0], range[1], diverging);
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (!isNumber(v)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) [low, high] = [0, 1];
  // Magnitudes start at zero unless all of them lie far from it.
  if (!diverging && low > 0 && low < 0.5 * high) low = 0;
  return makeScale(low, high, diverging);
}

// ---------------------------------------------------------------------------------------------------------------- the document

const SVG = 'http://www.w3.org/2000/svg';

/** An element. Strings among the children become text nodes; there is no way to hand in markup. */
function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split('.');
  return fill(document.createElement(name || 'div'), classes, properties, children);
}

/** The same for SVG. */
function s(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split('.');
  return fill(document.createElementNS(SVG, name), classes, properties, children);
}

function fill(element, classes, properties, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (key === 'style') for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else if (key === 'data') Object.assign(element.dataset, value);
    else if (key === 'value' || key === 'checked' || key === 'selected') element[key] = value;
    else element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const CHIP_LENGTH = 32;

/** A token as a small block: marks in their own colour, direction isolated, clipped when very long. */
function tokenChip(token, { tint = null, title = null, tag = 'bdi.token', ...properties } = {}) {
  const runs = tokenRuns(token);
  const total = runs.reduce((n, run) => n + [...run.text].length, 0);
  let room = CHIP_LENGTH;
  const parts = [];
  for (const run of runs) {
    if (room <= 0) break;
    const text = clip(run.text, room);
    room -= [...text].length;
    parts.push(run.mark ? h(run.text.length > 1 ? 'span.mark.code' : 'span.mark', {}, text) : text);
  }
  const style = tint ? { background: tint.css, color: tint.ink } : {};
  const full = title ?? (total > CHIP_LENGTH ? tokenText(token) : null);
  return h(tint ? `${tag}.tinted` : tag, { dir: 'ltr', style, title: full, ...properties }, parts);
}

const tooltip = h('div.tooltip', { 'aria-hidden': 'true', hidden: true });

function showTooltip(content, x, y) {
  tooltip.replaceChildren(...[content].flat(Infinity).filter(Boolean));
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${Math.max(8, top)}px`;
}

const hideTooltip = () => { tooltip.hidden = true; };

/** Calls `describe(key)` while the pointer or the focus is on a child that carries `data-key`. */
function tellOnHover(container, describe) {
  const target = (event) => event.target.closest?.('[data-key]');
  container.addEventListener('pointermove', (event) => {
    const element = target(event);
    if (element && container.contains(element)) showTooltip(describe(element.dataset.key), event.clientX, event.clientY);
    else hideTooltip();
  });
  container.addEventListener('pointerleave', hideTooltip);
  container.addEventListener('focusin', (event) => {
    const element = target(event);
    if (!element || !element.matches(':focus-visible')) return;
    const box = element.getBoundingClientRect();
    showTooltip(describe(element.dataset.key), box.right - 10, box.bottom - 12);
  });
  container.addEventListener('focusout', hideTooltip);
  return container;
}

/** W_V W_O with its letters below the line. */
const formula = (text) => h('span.formula', {}, text.split(/(_[A-Z])/).map((part) => (/^_[A-Z]$/.test(part) ? h('sub', {}, part[1]) : part)));

const section = (title, lead, ...children) =>
  h('section', {}, h('h3', {}, title), lead ? h('p.lead', {}, lead) : null, ...children);

// --------------------------------------------------------------------------------------------------------- the filter language

/*  or      := and ('or' and)*
 *  and     := not ('and' not)*
 *  not     := 'not' not | compare
 *  compare := value (('<' | '<=' | '>' | '>=' | '==' | '!=') value)*      chains: 0.2 < x < 0.5
 *  value   := number | name | '-' value | 'abs' '(' value ')' | '(' or ')'
 */
function parseFilter(text, resolve) {
  const pattern = /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([\p{L}_][\p{L}\p{N}_.@]*)|(<=|>=|==|!=|&&|\|\||[<>=≤≥≠!()\-−]))/uy;
  const tokens = [];
  let at = 0;
  const rest = text.trimEnd();
  while (at < rest.length) {
    pattern.lastIndex = at;
    const match = pattern.exec(rest);
    if (!match) throw new FilterError(`“${rest.slice(at).trim()[0]}” is not part of a filter`);
    const [, number, word, symbol] = match;
    const same = { '=': '==', '≤': '<=', '≥': '>=', '≠': '!=', '−': '-', '&&': 'and', '||': 'or', '!': 'not' };
    if (number) tokens.push({ kind: 'number', value: Number(number) });
    else if (word && ['and', 'or', 'not'].includes(word.toLowerCase())) tokens.push({ kind: word.toLowerCase() });
    else if (word) tokens.push({ kind: 'name', value: word });
    else tokens.push({ kind: same[symbol] ?? symbol });
    at = pattern.lastIndex;
  }
  let next = 0;
  const peek = () => tokens[next]?.kind;
  const take = (kind) => (peek() === kind ? tokens[next++] : null);
  const say = (token) => (token ? `“${token.value ?? token.kind}”` : 'the end');

  function parseOr() {
    let left = parseAnd();
    while (take('or')) { const [a, b] = [left, truth(parseAnd())]; truth(a); left = { type: 'truth', of: (i) => a.of(i) || b.of(i) }; }
    return left;
  }
  function parseAnd() {
    let left = parseNot();
    while (take('and')) { const [a, b] = [left, truth(parseNot())]; truth(a); left = { type: 'truth', of: (i) => a.of(i) && b.of(i) }; }
    return left;
  }
  function parseNot() {
    if (!take('not')) return parseCompare();
    const inner = truth(parseNot());
    return { type: 'truth', of: (i) => !inner.of(i) };
  }
  const compares = {
    '<': (a, b) => a < b, '<=': (a, b) => a <= b, '>': (a, b) => a > b, '>=': (a, b) => a >= b,
    '==': (a, b) => a === b, '!=': (a, b) => a !== b,
  };
  function parseCompare() {
    let left = parseValue();
    const links = [];
    while (compares[peek()]) {
      const compare = compares[tokens[next++].kind];
      const [a, b] = [left, parseValue()];
      if (a.type !== 'number' || b.type !== 'number') throw new FilterError('a comparison needs a number or a score on both sides');
      // A score that a head does not have satisfies no comparison.
      links.push((i) => { const [x, y] = [a.of(i), b.of(i)]; return isNumber(x) && isNumber(y) && compare(x, y); });
      left = b;
    }
    return links.length ? { type: 'truth', of: (i) => links.every((link) => link(i)) } : left;
  }
  function parseValue() {
    const token = tokens[next++];
    if (token?.kind === 'number') return { type: 'number', of: () => token.value };
    if (token?.kind === '-') {
      const inner = parseValue();
      if (inner.type !== 'number') throw new FilterError('a minus sign needs a number after it');
      return { type: 'number', of: (i) => -inner.of(i) };
    }
    if (token?.kind === 'name' && token.value === 'abs' && take('(')) {
      const inner = parseOr();
      if (inner.type !== 'number' || !take(')')) throw new FilterError('abs( … ) takes one number and a closing parenthesis');
      return { type: 'number', of: (i) => { const v = inner.of(i); return isNumber(v) ? Math.abs(v) : null; } };
    }
    if (token?.kind === 'name') return { type: 'number', of: resolve(token.value) };
    if (token?.kind === '(') {
      const inner = parseOr();
      if (!take(')')) throw new FilterError('a parenthesis is not closed');
      return inner;
    }
    throw new FilterError(`a score, a number or a parenthesis is missing before ${say(token)}`);
  }
  function truth(node) {
    if (node.type !== 'truth') throw new FilterError('write a comparison, such as layer > 5');
    return node;
  }

  if (!tokens.length) return null;
  const tree = truth(parseOr());
  if (next < tokens.length) throw new FilterError(`${say(tokens[next])} comes after the end of the expression: join parts with and, or`);
  return tree.of;
}

class FilterError extends Error {}

// ---------------------------------------------------------------------------------------------------------------- the page data

/** What the page knows about the model, prepared once. */
function prepare(payload) {
  const { meta, values } = payload;
  const nHeads = meta.n_heads;
  const count = meta.n_layers * nHeads;
  const groupSize = Math.max(1, Math.floor(nHeads / (meta.n_kv_heads || nHeads)));
  const scores = [...payload.scores];
  const prompt = payload.prompt ?? null;
  if (prompt?.head_value && !scores.some((score) => score.key === 'prompt_value')) {
    scores.unshift({
      key: 'prompt_value', label: 'Attribution on this prompt', group: 'Prompt', diverging: true, range: null,
      source: 'direct logit attribution, value path, all source tokens', note: `What the head adds to the ${prompt.quantity}.`,
    });
    values.prompt_value = prompt.head_value;
  }
  // Scores of one group stand together, groups in the order of their first score.
  const groups = [...new Set(scores.map((score) => score.group))];
  scores.sort((a, b) => groups.indexOf(a.group) - groups.indexOf(b.group));
  const byKey = new Map(scores.map((score) => [score.key, score]));
  const scales = new Map();
  const sorted = new Map();
  return {
    payload, meta, scores, values, prompt, count, nHeads, groupSize, byKey,
    grouped: groupSize > 1,
    tokens: payload.tokens ?? [],
    layerOf: (i) => Math.floor(i / nHeads),
    headOf: (i) => i % nHeads,
    groupOf: (i) => Math.floor((i % nHeads) / groupSize),
    label: (i) => `${Math.floor(i / nHeads)}.${i % nHeads}`,
    index: (layer, head) => (layer >= 0 && layer < meta.n_layers && head >= 0 && head < nHeads ? layer * nHeads + head : null),
    value: (key, i) => values[key]?.[i] ?? null,
    scale(key) {
      if (!scales.has(key)) scales.set(key, scaleOf(values[key], byKey.get(key).diverging, byKey.get(key).range));
      return scales.get(key);
    },
    replaceScore(score, list) {
      byKey.set(score.key, score);
      values[score.key] = list;
      scales.delete(score.key);
      sorted.delete(score.key);
    },
    /** 1 is the largest value of all heads. */
    rank(key, i) {
      if (!sorted.has(key)) sorted.set(key, values[key].filter(isNumber).sort((a, b) => b - a));
      const list = sorted.get(key);
      const v = values[key][i];
      if (!isNumber(v)) return null;
      let [low, high] = [0, list.length];
      while (low < high) { const mid = (low + high) >> 1; if (list[mid] > v) low = mid + 1; else high = mid; }
      return { rank: low + 1, of: list.length };
    },
    has: (key) => byKey.has(key),
    cards: once(async () => JSON.parse(await blockText('cards'))),
  };
}

let data = null;

const state = {
  route: null,
  score: null, x: null, y: null,
  filterText: '', filter: null, filterError: null,
  reads: '', writes: '', hits: null,
  brushed: null, boxes: [],
  sort: { key: null, descending: true },
  allColumns: false, allRows: false,
  compare: new Set(),
  promptHead: null, promptSource: null, accountBy: 'kind',
};

function resolveName(name) {
  const known = new Map([['layer', data.layerOf], ['head', data.headOf], ['kv', data.groupOf]]).get(name);
  if (known) return known;
  const keys = data.scores.map((score) => score.key);
  const lower = name.toLowerCase();
  const exact = keys.find((key) => key.toLowerCase() === lower);
  const near = exact ? [exact] : keys.filter((key) => key.toLowerCase().includes(lower));
  if (near.length === 1) return (i) => data.value(near[0], i);
  if (near.length > 1) throw new FilterError(`“${name}” could be ${near.slice(0, 4).join(', ')}${near.length > 4 ? ', …' : ''}`);
  throw new FilterError(`there is no score “${name}”; the names are listed below`);
}

function isShown(i) {
  return (!state.filter || state.filter(i)) && (!state.hits || state.hits.heads.has(i)) && (!state.brushed || state.brushed.has(i));
}

const narrowed = () => Boolean(state.filter || state.hits || state.brushed);

function describeHead(key, i) {
  const score = data.byKey.get(key);
  const rank = data.rank(key, i);
  return [
    h('strong', {}, `Head ${data.label(i)}`),
    data.grouped ? h('span.soft', {}, ` · key/value head ${data.groupOf(i)}`) : null,
    h('div', {}, `${score.label} `, h('b.num', {}, format(data.value(key, i), { sign: score.diverging }))),
    rank ? h('div.soft', {}, `${rank.rank} of ${rank.of}, largest first`) : h('div.soft', {}, 'not defined for this head'),
  ];
}

// ------------------------------------------------------------------------------------------------------------------------- parts

function headLink(i, { className = 'head-link', text = null } = {}) {
  return h(`a.${className}`, { href: `#${data.label(i)}` }, text ?? data.label(i));
}

/** The layer x head map. One tab stop; arrows move, Enter opens, c marks for comparison. */
function headMap({ compact = false, key = () => state.score, current = null, label = 'Map of heads' } = {}) {
  const { meta, nHeads, groupSize } = data;
  const columns = [compact ? '1.5rem' : '2rem'];
  for (let head = 0; head < nHeads; head++) {
    if (data.grouped && head && head % groupSize === 0) columns.push(compact ? '3px' : '8px');
    columns.push('minmax(0, 1fr)');
  }
  const columnOf = (head) => head + 2 + (data.grouped ? Math.floor(head / groupSize) : 0);
  const cells = [];
  const rows = [];
  const showNumbers = !compact && nHeads <= 16;
  const every = Math.max(1, Math.ceil(nHeads / (compact ? 8 : 32)));
  if (data.grouped && !compact) {
    const spans = [];
    for (let g = 0; g < meta.n_kv_heads; g++) {
      const first = g * groupSize;
      spans.push(h('div.kv', { style: { 'grid-column': `${columnOf(first)} / ${columnOf(first + groupSize - 1) + 1}` } },
        h('span', {}, meta.n_kv_heads <= 4 ? `key/value ${g}` : `${g}`)));
    }
    rows.push(h('div.map-row.kv-row', { 'aria-hidden': 'true' }, meta.n_kv_heads > 4 ? h('div.kv-name', {}, 'k/v') : null, spans));
  }
  rows.push(h('div.map-row.map-head', { role: 'row' },
    h('div.corner', { role: 'columnheader' }, h('span.visually-hidden', {}, 'Layer')),
    Array.from({ length: nHeads }, (_, head) => h('div', { role: 'columnheader', style: { 'grid-column': columnOf(head) } },
      h(head % every ? 'span.visually-hidden' : head % 4 && nHeads > 16 ? 'span.minor' : 'span', {}, String(head))))));
  for (let layer = 0; layer < meta.n_layers; layer++) {
    const row = h('div.map-row', { role: 'row' }, h('div.layer', { role: 'rowheader' }, String(layer)));
    for (let head = 0; head < nHeads; head++) {
      const i = layer * nHeads + head;
      const cell = h('div.cell', {
        role: 'gridcell', tabindex: '-1', data: { key: i }, style: { 'grid-column': columnOf(head) },
      }, showNumbers ? h('span.cell-number', { 'aria-hidden': 'true' }) : null);
      cells.push(cell);
      row.append(cell);
    }
    rows.push(row);
  }
  const size = meta.n_layers <= 8 ? 'large' : meta.n_layers <= 16 ? 'medium' : 'small';
  const grid = h(`div.map.${compact ? 'compact' : size}`, {
    role: 'grid', 'aria-label': label, style: { '--columns': columns.join(' '), '--n-heads': nHeads },
  }, rows);

  let active = current ?? 0;
  cells[active].tabIndex = 0;
  const focus = (i) => {
    cells[active].tabIndex = -1;
    active = i;
    cells[active].tabIndex = 0;
    cells[active].focus();
  };
  grid.addEventListener('keydown', (event) => {
    const cell = event.target.closest('.cell');
    if (!cell || event.altKey || event.metaKey) return;
    const i = Number(cell.dataset.key);
    const [layer, head] = [data.layerOf(i), data.headOf(i)];
    const to = {
      ArrowLeft: head ? i - 1 : i, ArrowRight: head < nHeads - 1 ? i + 1 : i,
      ArrowUp: layer ? i - nHeads : i, ArrowDown: layer < meta.n_layers - 1 ? i + nHeads : i,
      Home: event.ctrlKey ? 0 : i - head, End: event.ctrlKey ? data.count - 1 : i - head + nHeads - 1,
      PageUp: head, PageDown: data.count - nHeads + head,
    }[event.key];
    if (to !== undefined) { focus(to); event.preventDefault(); }
    else if (event.key === 'Enter' || event.key === ' ') { go(data.label(i)); event.preventDefault(); }
    else if (event.key === 'c' && !event.ctrlKey) toggleCompare(i);
  });
  // Shift-click marks a head; without this it would also select the text of the page.
  grid.addEventListener('mousedown', (event) => { if (event.shiftKey) event.preventDefault(); });
  grid.addEventListener('click', (event) => {
    const cell = event.target.closest('.cell');
    if (!cell) return;
    const i = Number(cell.dataset.key);
    if (event.shiftKey || event.ctrlKey || event.metaKey) toggleCompare(i);
    else go(data.label(i));
  });
  if (data.grouped) {
    const mark = (event) => {
      const cell = event.target.closest?.('.cell');
      const i = cell ? Number(cell.dataset.key) : null;
      for (const other of grid.querySelectorAll('.shares')) other.classList.remove('shares');
      if (i === null || event.type === 'pointerleave' || event.type === 'focusout') return;
      const first = i - data.headOf(i) + data.groupOf(i) * groupSize;
      for (let k = first; k < first + groupSize; k++) cells[k].classList.add('shares');
    };
    for (const type of ['pointerover', 'pointerleave', 'focusin', 'focusout']) grid.addEventListener(type, mark);
  }
  tellOnHover(grid, (k) => describeHead(key(), Number(k)));

  function update() {
    const k = key();
    grid.classList.toggle('narrowed', narrowed() && !compact);
    const scale = data.scale(k);
    const score = data.byKey.get(k);
    cells.forEach((cell, i) => {
      const v = data.value(k, i);
      const colour = isNumber(v) ? scale.at(v) : null;
      cell.style.background = colour ? colour.css : '';
      cell.style.color = colour ? colour.ink : '';
      cell.classList.toggle('missing', !colour);
      cell.classList.toggle('dim', !compact && !isShown(i));
      cell.classList.toggle('marked', state.compare.has(i));
      cell.classList.toggle('current', i === current);
      const text = formatIn(scale, v);
      if (showNumbers) cell.firstChild.textContent = text;
      cell.setAttribute('aria-label', `Head ${data.label(i)}, ${score.label} ${isNumber(v) ? text : 'not defined'}${state.compare.has(i) ? ', marked for comparison' : ''}`);
    });
  }
  update();
  return { node: grid, update };
}

/** Colour bar with the range, and one tick for each value, so that the colours can be judged. */
function legend(scale, values, { label = 'Colour range' } = {}) {
  const ramp = currentRamps()[scale.diverging ? 'diverging' : 'sequential'];
  const stops = Array.from({ length: 17 }, (_, i) => ramp[i * 16].css).join(', ');
  const ends = scale.diverging ? [scale.lo, 0, scale.hi] : [scale.lo, (scale.lo + scale.hi) / 2, scale.hi];
  return h('div.legend', { role: 'img', 'aria-label': `${label}: ${format(scale.lo)} to ${format(scale.hi)}` },
    ticks(values, scale.lo, scale.hi),
    h('div.legend-bar', { style: { background: `linear-gradient(90deg, ${stops})` } }),
    h('div.legend-ends', {}, ends.map((v) => h('span', {}, formatIn(scale, v).replace(/(\.\d*?)0+$/, '$1').replace(/\.$/, '')))));
}

/** A rug of all values as one path; `mark` is drawn over it. */
function ticks(values, lo, hi, mark = null) {
  const at = (v) => Math.min(200, Math.max(0, ((v - lo) / (hi - lo || 1)) * 200)).toFixed(1);
  const path = values.filter(isNumber).map((v) => `M${at(v)} 1V9`).join('');
  return s('svg.ticks', { viewBox: '0 0 200 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    s('path.rug', { d: path, style: { 'stroke-opacity': Math.min(0.9, Math.max(0.18, 16 / values.length)) } }),
    lo < 0 && hi > 0 ? s('path.zero', { d: `M${at(0)} 0V10` }) : null,
    isNumber(mark) ? s('path.here', { d: `M${at(mark)} 0V10` }) : null);
}

/** The choice of a score, grouped. */
function scoreSelect(id, value, choose) {
  const groups = new Map();
  for (const score of data.scores) {
    const name = score.group ?? 'Scores';
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(score);
  }
  return h('select', { id, onchange: (event) => choose(event.target.value) },
    [...groups].map(([name, scores]) => h('optgroup', { label: name },
      scores.map((score) => h('option', { value: score.key, selected: score.key === value }, score.label)))));
}

/** Tokens as running text, each on the colour of its value. */
function tokenStrip(tokens, values, { scale = null, answerAt = null, label, choose = null, chosen = null }) {
  const strip = h('ol.token-strip', { 'aria-label': label });
  tokens.forEach((token, position) => {
    const value = values ? values[position] : null;
    const tint = values && isNumber(value) ? scale.at(value) : null;
    const told = values ? `${tokenText(token)}, position ${position}: ${format(value, { sign: true })}` : `${tokenText(token)}, position ${position}`;
    const content = [tokenChip(token, { tint, title: '' }), h('span.visually-hidden', {}, ` ${told}`)];
    strip.append(h(position === answerAt ? 'li.explained' : 'li', { data: { key: position } }, choose && position <= answerAt
      ? h('button.token-button', { type: 'button', 'aria-pressed': String(position === chosen), onclick: () => choose(position) }, content) : content));
    if (token.includes('\n')) strip.append(h('li.break', { 'aria-hidden': 'true' }));
  });
  return tellOnHover(strip, (k) => [
    h('strong', {}, tokenChip(tokens[k])), h('span.soft', {}, ` position ${k}`),
    values ? h('div', {}, 'from this token ', h('b.num', {}, format(values[k], { sign: true }))) : null,
    Number(k) === answerAt ? h('div.soft', {}, 'the next token after this one is explained') : null,
  ]);
}

/** Columns over tokens, up and down from a zero line. */
function tokenBars(tokens, values, { diverging, label, say }) {
  const scale = scaleOf(values, diverging);
  const top = Math.max(0, ...values);
  const bottom = diverging ? Math.min(0, ...values) : 0;
  const span = top - bottom || 1;
  const share = (v) => `${(Math.abs(v) / span) * 100}%`;
  const columns = tokens.map((token, k) => {
    const v = values[k];
    return h('div.bar-column', { data: { key: k } },
      h('div.bar-area', {}, h('div.bar', {
        style: { height: share(v), background: diverging ? scale.at(v).css : 'var(--accent)', top: `${((top - Math.max(0, v)) / span) * 100}%` },
      })),
      h('div.bar-label', {}, tokenChip(token)));
  });
  const chart = h('div.token-bars', { role: 'img', 'aria-label': label, style: { '--zero': `${(top / span) * 100}%` } }, columns);
  return h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': label }, tellOnHover(chart, (k) => [
    h('strong', {}, tokenChip(tokens[k])), h('span.soft', {}, ` position ${k}`), h('div', {}, `${say} `, h('b.num', {}, format(values[k], { sign: diverging }))),
  ]));
}

/** A square of destination rows and source columns, drawn on a canvas so that long prompts stay light. */
function heatmap(tokens, matrix, { scale, label, say }) {
  const n = tokens.length;
  const size = n <= 14 ? 26 : n <= 24 ? 20 : n <= 40 ? 14 : n <= 80 ? 10 : Math.max(2, Math.floor(640 / n));
  const every = Math.ceil(12 / size);
  const canvas = h('canvas', { width: n, height: n, role: 'img', 'aria-label': label, style: { width: `${n * size}px`, height: `${n * size}px` } });
  const context = canvas.getContext('2d');
  const image = context.createImageData(n, n);
  for (let t = 0; t < n; t++) {
    for (let source = 0; source <= t; source++) {
      const [r, g, b] = scale.at(matrix[t * n + source]).bytes;
      image.data.set([r, g, b, 255], 4 * (t * n + source));
    }
  }
  context.putImageData(image, 0, 0);
  const labels = (kind) => h(`div.${kind}`, { 'aria-hidden': 'true' }, tokens.map((token, k) =>
    k % every ? null : h('div', { style: { [kind === 'heat-rows' ? 'top' : 'left']: `${k * size}px`, '--cell': `${size * every}px` } }, tokenChip(token))));
  const cursor = h('div.heat-cursor', { hidden: true, style: { width: `${size}px`, height: `${size}px` } });
  const plane = h('div.heat-plane', { style: { width: `${n * size}px`, height: `${n * size}px` } }, canvas, cursor);
  plane.addEventListener('pointermove', (event) => {
    const box = plane.getBoundingClientRect();
    const source = Math.floor((event.clientX - box.left) / size);
    const t = Math.floor((event.clientY - box.top) / size);
    if (source < 0 || t >= n || source > t) { cursor.hidden = true; hideTooltip(); return; }
    cursor.hidden = false;
    cursor.style.left = `${source * size}px`;
    cursor.style.top = `${t * size}px`;
    showTooltip([
      h('div', {}, tokenChip(tokens[t]), h('span.soft', {}, ` ${t} looks at `), tokenChip(tokens[source]), h('span.soft', {}, ` ${source}`)),
      h('div', {}, `${say} `, h('b.num', {}, format(matrix[t * n + source]))),
    ], event.clientX, event.clientY);
  });
  plane.addEventListener('pointerleave', () => { cursor.hidden = true; hideTooltip(); });
  return h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': label },
    h('div.heat', {}, labels('heat-rows'), plane, h('div.heat-corner'), labels('heat-columns')));
}

// -------------------------------------------------------------------------------------------------------------- plotly's charts

/** Resolves after the page has been painted; a hidden page does not paint, so time is the other way out. */
const painted = () => new Promise((done) => {
  requestAnimationFrame(() => setTimeout(done));
  setTimeout(done, 500);
});

const plotly = once(async () => {
  // Inflating and running four megabytes takes a moment: what needs no plotly is shown before.
  await painted();
  const source = await blockText('plotly');
  const script = document.createElement('script');
  // The content security policy knows this text by its hash; any other script would be refused.
  script.textContent = source;
  document.head.append(script);
  return window.Plotly;
});

const CHART_CONFIG = { displayModeBar: false, displaylogo: false, responsive: true, typesetMath: false, showTips: false, scrollZoom: false };

function chartLayout({ x, y, height, ...more }) {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  const axis = (own) => ({
    gridcolor: get('--rule'), zerolinecolor: get('--zero'), zerolinewidth: 1, linecolor: get('--rule'), ticks: '', automargin: true,
    tickfont: { color: get('--soft'), size: 11 }, ...own,
    title: { text: plotlyText(own.title ?? ''), font: { size: 12, color: get('--soft') }, standoff: 8 },
  });
  return {
    height, autosize: true, showlegend: false, margin: { l: 44, r: 12, t: 10, b: 40 },
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)', dragmode: false,
    font: { family: style.fontFamily || 'sans-serif', color: get('--ink'), size: 12 },
    xaxis: axis({ fixedrange: true, ...x }), yaxis: axis({ fixedrange: true, ...y }), ...more,
  };
}

/** A chart that draws itself when plotly is there. `tell` makes the tooltip of a point, `open` is called on a click. */
function chart({ height, label, tell = null, open = null, select = null }) {
  const canvas = h('div.chart-canvas', { style: { height: `${height}px` } });
  const node = h('div.chart', { role: 'img', 'aria-label': label }, canvas);
  let wired = false;
  let drawing = 0;
  let turn = 0;
  async function draw(traces, layout) {
    const mine = ++turn;
    const Plotly = await plotly();
    // A later call, or a view that has gone, makes this one idle.
    if (mine !== turn || !node.isConnected) return;
    // Plotly tells of selections that it redraws itself; only the reader's own count.
    drawing += 1;
    await Plotly.react(canvas, traces, chartLayout({ height, ...layout }), CHART_CONFIG);
    drawing -= 1;
    node.classList.add('drawn');
    if (wired) return;
    wired = true;
    if (tell) {
      canvas.on('plotly_hover', ({ points, event }) => {
        const content = tell(points[0]);
        if (content) showTooltip(content, event.clientX, event.clientY);
      });
      canvas.on('plotly_unhover', hideTooltip);
    }
    if (open) canvas.on('plotly_click', ({ points }) => open(points[0]));
    if (select) {
      canvas.on('plotly_selected', (event) => { if (!drawing) select(event?.points ?? [], event?.selections ?? []); });
      canvas.on('plotly_deselect', () => { if (!drawing) select([], []); });
    }
  }
  return { node, draw };
}

function spectrumChart(card, label) {
  const values = card.singular_values;
  const flagged = new Set((card.directions ?? []).flatMap((d, k) => (d.separable ? [] : [k])));
  const total = values.reduce((sum, v) => sum + v * v, 0) || 1;
  const made = chart({
    height: 220, label: `Singular values of head ${label}, from ${format(values[0])} to ${format(values.at(-1))}`,
    tell: (p) => [h('div', {}, `singular value ${p.x} `, h('b.num', {}, format(values[p.x - 1]))),
      h('div.soft', {}, `${percent((values[p.x - 1] ** 2) / total)} of the squared norm${flagged.has(p.x - 1) ? '; not separable from the next' : ''}`)],
  });
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const [accent, soft] = ['--accent', '--bar'].map((name) => style.getPropertyValue(name).trim());
    const read = card.directions?.length ?? 0;
    return made.draw([{
      type: 'bar', x: values.map((_, k) => k + 1), y: values, hoverinfo: 'none',
      marker: { color: values.map((_, k) => (k < read ? accent : soft)), line: { width: 0 } },
    }], {
      x: { title: read ? 'index; the coloured ones are read above' : 'index', showgrid: false }, y: { title: 'singular value', rangemode: 'tozero' }, bargap: 0.25,
    });
  };
  return { node: made.node, draw };
}

function eigenvalueChart(eigenvalues, label, space) {
  const reach = 1.1 * Math.max(1e-12, ...eigenvalues.map(([re, im]) => Math.hypot(re, im)));
  const made = chart({
    height: 280, label: `Eigenvalues of ${space} of head ${label} in the complex plane`,
    tell: (p) => [h('div', {}, 'eigenvalue ', h('b.num', {}, `${format(p.x)} ${p.y < 0 ? MINUS : '+'} ${format(Math.abs(p.y))} i`)),
      h('div.soft', {}, `size ${format(Math.hypot(p.x, p.y))}`)],
  });
  const draw = () => {
    const scale = makeScale(-reach / 2, reach / 2, true);
    const ink = getComputedStyle(document.documentElement).getPropertyValue('--paper').trim();
    return made.draw([{
      type: 'scatter', mode: 'markers', x: eigenvalues.map((v) => v[0]), y: eigenvalues.map((v) => v[1]), hoverinfo: 'none', cliponaxis: false,
      marker: { size: 8, color: eigenvalues.map((v) => scale.at(v[0] >= 0 ? reach / 3 : -reach / 3).css), line: { width: 0.75, color: ink }, opacity: 0.9 },
    }], {
      x: { title: 'real part', range: [-reach, reach] }, y: { title: 'imaginary part', range: [-reach, reach], scaleanchor: 'x', constrain: 'domain' },
    });
  };
  return { node: made.node, draw };
}

/** The small spectrum of the comparison, without axes. */
function spark(values) {
  const top = values[0] || 1;
  const width = 240 / values.length;
  return s('svg.spark', { viewBox: '0 0 240 48', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    values.map((v, k) => s('rect', { x: k * width, y: 48 - (v / top) * 48, width: Math.max(0.5, width * 0.75), height: (v / top) * 48 })));
}

// ------------------------------------------------------------------------------------------------------------------ view: atlas

function atlasView() {
  const { meta } = data;
  const map = headMap({ label: 'Map of heads, layers down and heads across' });
  const about = h('div.score-note');
  const legendPlace = h('div');
  const scatter = chart({
    height: meta.n_layers > 16 ? 560 : 430, label: 'Scatter of two scores, one point a head',
    tell: (p) => scatterTip(p.customdata), open: (p) => go(data.label(p.customdata)),
    select: (points, boxes) => {
      state.brushed = points.length ? new Set(points.map((p) => p.customdata)) : null;
      state.boxes = points.length ? boxes : [];
      refresh();
    },
  });
  const scatterTip = (i) => [
    h('strong', {}, `Head ${data.label(i)}`),
    [...new Set([state.x, state.y, state.score])].map((key) => h('div', {}, `${data.byKey.get(key).label} `, h('b.num', {}, format(data.value(key, i))))),
  ];
  const choose = (name) => (key) => {
    state[name] = key;
    // A box belongs to the axes it was drawn on; the heads in it stay chosen.
    if (name !== 'score') state.boxes = [];
    refresh();
  };
  const table = headTable();
  const tools = filterTools();
  const dense = data.nHeads > 16;

  const node = h(dense ? 'div.atlas.dense' : 'div.atlas', { style: { '--map-width': `${mapWidth()}px` } },
    h('div.atlas-top', {},
      h('section.map-panel', { 'aria-label': 'Map of heads' },
        h('div.field', {}, h('label', { for: 'score' }, 'Colour'), scoreSelect('score', state.score, choose('score'))),
        about, map.node, legendPlace,
        h('p.hint', {}, `Layers run down, heads across.${data.grouped ? ` Each block of ${data.groupSize} query heads shares a key/value head.` : ''} `,
          'Click opens a head, arrow keys move, Shift-click or ', h('kbd', {}, 'c'), ' marks for comparison.')),
      h('section.scatter-panel', { 'aria-label': 'Two scores against each other' },
        h('div.field-row', {},
          h('div.field', {}, h('label', { for: 'score-x' }, 'Across'), scoreSelect('score-x', state.x, choose('x'))),
          h('div.field', {}, h('label', { for: 'score-y' }, 'Up'), scoreSelect('score-y', state.y, choose('y')))),
        scatter.node,
        h('p.hint', {}, 'Coloured as the map. Drag a box to keep the heads inside it, double-click to let go.'))),
    h('section.table-panel', { 'aria-label': 'Table of heads' }, h('h2', {}, 'Heads'), tools.node, table.node));

  function drawScatter() {
    const scale = data.scale(state.score);
    const [x, y] = [data.byKey.get(state.x), data.byKey.get(state.y)];
    const all = Array.from({ length: data.count }, (_, i) => i);
    const style = getComputedStyle(document.documentElement);
    const line = style.getPropertyValue('--mark-line').trim();
    const missing = style.getPropertyValue('--rule').trim();
    const pad = (key) => {
      const { lo, hi } = scaleOf(data.values[key], false, data.byKey.get(key).range);
      return [lo - 0.04 * (hi - lo), hi + 0.04 * (hi - lo)];
    };
    scatter.draw([{
      type: 'scatter', mode: 'markers', x: data.values[state.x], y: data.values[state.y], customdata: all, hoverinfo: 'none', cliponaxis: false,
      selected: { marker: { opacity: 1 } }, unselected: { marker: { opacity: 0.15 } },
      marker: {
        size: data.count > 400 ? 7 : 9, line: { width: 0.75, color: line },
        color: all.map((i) => { const v = data.value(state.score, i); return isNumber(v) ? scale.at(v).css : missing; }),
        opacity: all.map((i) => (isShown(i) ? 1 : 0.12)),
      },
    }], {
      x: { title: x.label, range: pad(state.x) }, y: { title: y.label, range: pad(state.y) }, dragmode: 'select',
      newselection: { line: { color: style.getPropertyValue('--accent').trim(), width: 1, dash: 'dot' } },
      selections: state.boxes,
    });
  }

  function refresh() {
    const score = data.byKey.get(state.score);
    about.replaceChildren(h('p', {}, score.note ?? '', ' ', h('span.source', {}, score.source ?? '')));
    legendPlace.replaceChildren(legend(data.scale(state.score), data.values[state.score], { label: score.label }));
    map.update();
    table.update();
    tools.update();
    drawScatter();
    updateTray();
  }
  state.refreshAtlas = refresh;
  return { node, title: meta.model, update: refresh };
}

function mapWidth() {
  const cell = data.nHeads <= 8 ? 76 : data.nHeads <= 12 ? 50 : data.nHeads <= 16 ? 44 : 22;
  return Math.min(760, Math.max(360, 40 + data.nHeads * cell + (data.grouped ? 8 * data.meta.n_kv_heads : 0)));
}

/** Filter, token search, and what they leave. */
function filterTools() {
  const message = h('p.message', { id: 'filter-message', role: 'status' });
  const filter = h('input', {
    id: 'filter', type: 'text', autocomplete: 'off', spellcheck: 'false', value: state.filterText,
    placeholder: `${state.score} > 0.5 and layer > ${Math.floor(data.meta.n_layers / 2)}`, 'aria-describedby': 'filter-message',
    oninput: () => { setFilter(filter.value); state.refreshAtlas(); },
  });
  const names = h('details.names', {}, h('summary', {}, 'Names for the filter'),
    h('p', {}, 'Comparisons ', h('code', {}, '<  <=  >  >=  ==  !='), ', joined by ', h('code', {}, 'and'), ', ', h('code', {}, 'or'), ', ', h('code', {}, 'not'),
      ' and parentheses; ', h('code', {}, 'abs( )'), '. A part of a name will do when only one score has it.'),
    h('ul', {}, [['layer', 'layer'], ['head', 'head within the layer'], ...(data.grouped ? [['kv', 'key/value head']] : []), ...data.scores.map((score) => [score.key, score.label])]
      .map(([key, label]) => h('li', {}, h('button.name', {
        type: 'button', title: label, onclick: () => {
          filter.value = `${filter.value.trimEnd()}${filter.value.trim() ? ' ' : ''}${key} `;
          filter.focus();
          filter.dispatchEvent(new Event('input'));
        },
      }, key)))));
  const tokenInput = (name, label) => h('div.field.token-field', {}, h('label', { for: `search-${name}` }, label), h('input', {
    id: `search-${name}`, type: 'text', autocomplete: 'off', spellcheck: 'false', value: state[name], placeholder: 'any token',
    oninput: (event) => { state[name] = event.target.value; runSearch(); },
  }));
  const results = h('div.results', { 'aria-live': 'polite' });
  const left = h('p.left', { role: 'status' });

  let latest = 0;
  async function runSearch() {
    const mine = ++latest;
    if (!state.reads && !state.writes) { state.hits = null; state.refreshAtlas(); return; }
    const cards = await data.cards();
    if (mine !== latest) return;
    state.hits = searchTokens(cards, state.reads, state.writes);
    state.refreshAtlas();
  }

  function update() {
    message.textContent = state.filterError ? `This filter does not read: ${state.filterError}.` : '';
    filter.setAttribute('aria-invalid', String(Boolean(state.filterError)));
    const n = Array.from({ length: data.count }, (_, i) => i).filter(isShown).length;
    left.replaceChildren(narrowed() ? `${n} of ${data.count} heads` : `${data.count} heads`,
      narrowed() ? h('button.quiet', {
        type: 'button', onclick: () => {
          setFilter('');
          Object.assign(state, { reads: '', writes: '', hits: null, brushed: null, boxes: [] });
          for (const input of node.querySelectorAll('input')) input.value = '';
          state.refreshAtlas();
        },
      }, 'Show all') : '');
    results.replaceChildren(...(state.hits ? [searchResults(state.hits)] : []));
  }
  const node = h('div.tools', {},
    h('div.tool-row', {},
      h('div.field.filter-field', {}, h('label', { for: 'filter' }, 'Filter'), filter),
      h('fieldset.search', {}, h('legend.visually-hidden', {}, 'Which heads read or write a token'),
        tokenInput('reads', 'Reads token'), h('span.arrow', { 'aria-hidden': 'true' }, '→'), tokenInput('writes', 'Writes token'))),
    message,
    h('p.hint', {}, 'Tokens are searched in the singular directions of each head. With both boxes filled, a head must read the one and write the other at the same end of a direction. ',
      'A space counts; quotes ask for the whole token: ', h('code', {}, '" Paris"'), '.'),
    names, results, left);
  return { node, update };
}

function setFilter(text) {
  state.filterText = text;
  state.filterError = null;
  try {
    state.filter = parseFilter(text, resolveName);
  } catch (error) {
    if (!(error instanceof FilterError)) throw error;
    state.filter = null;
    state.filterError = error.message;
  }
}

function matchTokens(query) {
  const quoted = /^"(.*)"$/su.exec(query);
  const wanted = (quoted ? quoted[1] : query).replace(/·/g, ' ');
  const lower = wanted.toLowerCase();
  const found = new Set();
  data.tokens.forEach((token, k) => {
    if (quoted ? token === wanted : token.toLowerCase().includes(lower)) found.add(k);
  });
  return found;
}

/** Ends of directions that read a token like `reads` and write one like `writes`; the strongest first. */
function searchTokens(cards, reads, writes) {
  const [wantRead, wantWrite] = [reads ? matchTokens(reads) : null, writes ? matchTokens(writes) : null];
  const found = [];
  const heads = new Set();
  cards.forEach((card, i) => (card.directions ?? []).forEach((direction, k) => {
    for (const end of ['plus', 'minus']) {
      const read = wantRead && direction.reads[end].find(([token]) => wantRead.has(token));
      const write = wantWrite && direction.writes[end].find(([token]) => wantWrite.has(token));
      if ((wantRead && !read) || (wantWrite && !write)) continue;
      heads.add(i);
      found.push({ head: i, direction: k, end, energy: direction.energy, read: read?.[0], write: write?.[0] });
    }
  }));
  found.sort((a, b) => b.energy - a.energy);
  return { found, heads };
}

function searchResults({ found: all }) {
  const LIMIT = 24;
  const found = all.filter((hit) => isShown(hit.head));
  const heads = new Set(found.map((hit) => hit.head));
  if (all.length && !found.length) return h('p.soft', {}, 'Heads that read or write such a token are there, but the filter or the box on the scatter leaves none of them.');
  if (!found.length) return h('p.soft', {}, 'No direction shown on a card reads or writes such a token. Only the strongest tokens of each direction are kept in this file.');
  return h('div', {},
    h('p.soft', {}, `${plural(found.length, 'end')} of directions in ${plural(heads.size, 'head')}${found.length > LIMIT ? `; the ${LIMIT} strongest` : ''}`),
    h('ul.hits', {}, found.slice(0, LIMIT).map((hit) => h('li', {}, headLink(hit.head),
      hit.read !== undefined ? [' reads ', tokenChip(data.tokens[hit.read])] : null,
      hit.read !== undefined && hit.write !== undefined ? ' and' : null,
      hit.write !== undefined ? [' writes ', tokenChip(data.tokens[hit.write])] : null,
      h('span.soft.nowrap', { title: 'Index of the direction, its end, and its share of the squared norm of OV' }, ` ${hit.direction + 1}${hit.end === 'plus' ? '+' : MINUS}, ${percent(hit.energy)}`)))));
}

/** Heads as rows. Columns are the scores in view unless all are asked for. */
function headTable() {
  const place = h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Table of heads' });
  const foot = h('div.table-foot');
  const ROWS = 40;
  function update() {
    const inView = [...new Set([state.score, state.x, state.y])];
    const keys = state.allColumns ? data.scores.map((score) => score.key) : [...inView, ...data.scores.map((score) => score.key).filter((key) => !inView.includes(key))].slice(0, 7);
    const by = state.sort.key ?? state.score;
    const worth = (i) => (by === 'head' ? -i : data.value(by, i));
    const order = Array.from({ length: data.count }, (_, i) => i).filter(isShown).sort((a, b) => {
      const [x, y] = [worth(a), worth(b)];
      if (!isNumber(x) || !isNumber(y)) return isNumber(y) - isNumber(x) || a - b;
      return (state.sort.descending ? y - x : x - y) || a - b;
    });
    const shown = state.allRows ? order : order.slice(0, ROWS);
    const sortHeader = (key, label, title) => {
      const active = by === key;
      return h('th', { scope: 'col', 'aria-sort': active ? (state.sort.descending ? 'descending' : 'ascending') : null },
        h('button.sort', {
          type: 'button', title, onclick: () => {
            state.sort = active ? { key, descending: !state.sort.descending } : { key, descending: true };
            update();
            place.querySelector('th[aria-sort] button')?.focus();
          },
        }, label, h('span.sort-mark', { 'aria-hidden': 'true' }, active ? (state.sort.descending ? '↓' : '↑') : '')));
    };
    place.replaceChildren(h('table.heads', {},
      h('thead', {}, h('tr', {}, h('td.mark-column', {}, h('span.visually-hidden', {}, 'Compare')), sortHeader('head', 'Head', 'Layer and head'),
        keys.map((key) => sortHeader(key, data.byKey.get(key).label, data.byKey.get(key).note)))),
      h('tbody', {}, shown.map((i) => h('tr', {},
        h('td.mark-column', {}, h('input', {
          type: 'checkbox', checked: state.compare.has(i), 'aria-label': `Compare head ${data.label(i)}`, onchange: () => toggleCompare(i),
        })),
        h('th', { scope: 'row' }, headLink(i)),
        keys.map((key) => {
          const v = data.value(key, i);
          return h('td.num', {}, isNumber(v) ? h('span.swatch', { style: { background: data.scale(key).at(v).css } }) : null,
            formatIn(data.scale(key), v));
        }))))));
    foot.replaceChildren(
      order.length > ROWS ? h('button.quiet', { type: 'button', onclick: () => { state.allRows = !state.allRows; update(); } },
        state.allRows ? `Show the first ${ROWS} rows` : `Show all ${order.length} rows`) : '',
      data.scores.length > 7 ? h('button.quiet', { type: 'button', onclick: () => { state.allColumns = !state.allColumns; update(); } },
        state.allColumns ? 'Show fewer scores' : `Show all ${data.scores.length} scores`) : '');
  }
  return { node: h('div', {}, place, foot), update };
}

// ------------------------------------------------------------------------------------------------------------------- view: head

function headView(i) {
  const label = data.label(i);
  const map = headMap({ compact: true, current: i, label: `Map of heads, ${label} is open` });
  const body = h('div.card-body', {}, h('p.loading', {}, 'Reading the cards in this file …'));
  const previous = i > 0 ? i - 1 : null;
  const next = i < data.count - 1 ? i + 1 : null;
  const siblings = data.grouped
    ? Array.from({ length: data.groupSize }, (_, k) => i - data.headOf(i) + data.groupOf(i) * data.groupSize + k).filter((k) => k !== i) : [];
  const compareButton = h('button.quiet', { type: 'button', onclick: () => toggleCompare(i) });
  const node = h('div.card', {},
    h('aside.card-aside', { 'aria-label': 'All heads' }, map.node, h('p.hint', {}, data.byKey.get(state.score).label)),
    h('article', {},
      h('nav.card-nav', { 'aria-label': 'Heads' },
        h('a', { href: '#', data: { nav: 'atlas' } }, '← Atlas'),
        h('span', {}, previous !== null ? h('a', { href: `#${data.label(previous)}`, rel: 'prev', title: 'Previous head' }, `‹ ${data.label(previous)}`) : '',
          ' ', next !== null ? h('a', { href: `#${data.label(next)}`, rel: 'next', title: 'Next head' }, `${data.label(next)} ›`) : '')),
      h('header.card-head', {},
        h('h2', {}, `Head ${label}`),
        h('p.facts', {}, `layer ${data.layerOf(i)}, of 0 to ${data.meta.n_layers - 1}`,
          data.grouped ? [` · key/value head ${data.groupOf(i)}, shared with `, siblings.map((k, n) => [n ? ', ' : '', headLink(k)])] : null),
        compareButton),
      body));
  const charts = [];
  function update() {
    map.update();
    compareButton.textContent = state.compare.has(i) ? 'Remove from comparison' : 'Add to comparison';
    charts.forEach((draw) => draw());
    updateTray();
  }
  data.cards().then((cards) => {
    const card = cards[i];
    const onPrompt = data.prompt ? promptOnCard(i) : null;
    if (!card.singular_values.length) {
      body.replaceChildren(h('p.absent', {}, 'The weights of this head hold NaN or infinity: it has no spectrum, no directions and no scores.'),
        ...(onPrompt ? [onPrompt.strip, onPrompt.section] : []));
      update();
      return;
    }
    const spectrum = spectrumChart(card, label);
    const planes = [];
    if (card.eigenvalues_ov) planes.push(['Residual space', 'W_V W_O', eigenvalueChart(card.eigenvalues_ov, label, 'OV')]);
    if (card.eigenvalues_full) planes.push(['Vocabulary space', 'W_E W_V W_O W_U', eigenvalueChart(card.eigenvalues_full, label, 'full OV')]);
    charts.push(spectrum.draw, ...planes.map(([, , plane]) => plane.draw));
    const noEmbedding = 'This checkpoint holds no embeddings, so nothing of this head can be read in tokens or in the vocabulary space.';
    body.replaceChildren(...[
      h('p.evidence', {}, evidence(card, i)),
      onPrompt?.strip,
      section('Singular directions', card.directions?.length
        ? 'Each direction of OV reads one contrast of tokens and writes another. The sign of a pair is arbitrary, so both ends are shown: where + is read, + is written.' : null,
      card.directions?.length ? directionTable(card.directions, card.singular_values) : h('p.absent', {}, noEmbedding)),
      h('div.chart-row', {},
        h('section', {}, h('h3', {}, 'Spectrum'), h('p.lead', {}, spectrumSentence(card)), spectrum.node),
        h('section.planes', {}, h('h3', {}, 'Eigenvalues'),
          h('p.lead', {}, 'Positive ones (orange) copy what is read, negative ones (blue) push against it. OV is not normal: a large eigenvalue need not mean a large effect.'),
          h('div.plane-row', {}, planes.map(([title, of, plane]) => h('figure', {}, h('figcaption', {}, title, h('span.soft', {}, ', ', formula(of))), plane.node))),
          card.eigenvalues_full ? null : h('p.absent', {}, noEmbedding))),
      onPrompt?.section,
      section('Scores', data.payload.chance ? 'Where the head lies among all heads of the model; z counts standard deviations above what the head’s own spectrum would give by chance (hover says how).' : 'Where the head lies among all heads of the model.', scoreTable(i)),
    ].filter(Boolean));
    update();
  });
  return { node, title: `Head ${label}`, update, focus: 'h2' };
}

function listTokens(pairs, n = 3) {
  return pairs.slice(0, n).map(([token], k) => [k ? ' ' : '', tokenChip(data.tokens[token])]);
}

/** What the head does in one paragraph; every clause stands on a number of the card. */
function evidence(card, i) {
  const out = [];
  const first = card.directions?.[0];
  if (first) {
    out.push(`Its strongest direction (${percent(first.energy)} of the squared norm of OV) reads `, listTokens(first.reads.plus), ' and writes ', listTokens(first.writes.plus),
      '; at its other end it reads ', listTokens(first.reads.minus), ' and writes ', listTokens(first.writes.minus), '. ');
    if (!first.separable) out.push('That direction is not separable from the next, so its tokens are one choice among many: read the span. ');
  }
  // Through embedding and unembedding where there are any: that is the published score.
  const full = copyingOf(card.eigenvalues_full);
  const copying = full ?? copyingOf(card.eigenvalues_ov);
  if (isNumber(copying)) {
    const word = copying > 0.5 ? 'mostly positive' : copying < -0.5 ? 'mostly negative' : 'of both signs';
    out.push(`Its eigenvalues ${full === null ? 'in residual space' : 'over the vocabulary'} are ${word} (copying ${format(copying, { sign: true, digits: 3 })}). `);
  }
  const value = data.prompt?.head_value?.[i];
  if (isNumber(value)) {
    const rank = data.rank('prompt_value', i);
    const place = value < 0 ? rank.of + 1 - rank.rank : rank.rank;
    const way = value < 0 ? 'against' : 'for';
    out.push(`On the prompt it moves ${format(value, { sign: true })} to the `, quantity(), `: ${place === 1 ? 'the most' : `number ${place}`} ${way} it of ${rank.of} heads.`);
  }
  return out;
}

function copyingOf(eigenvalues) {
  if (!eigenvalues) return null;
  const size = eigenvalues.reduce((sum, [re, im]) => sum + Math.hypot(re, im), 0);
  return size ? eigenvalues.reduce((sum, [re]) => sum + re, 0) / size : null;
}

function spectrumSentence(card) {
  const squares = card.singular_values.map((v) => v * v);
  const total = squares.reduce((a, b) => a + b, 0);
  if (!total) return 'This head writes nothing: all its singular values are zero.';
  let sum = 0;
  const n = squares.findIndex((v) => (sum += v) >= 0.9 * total) + 1;
  return `${n} of ${squares.length} directions hold 90\u202f% of the squared norm of OV.`;
}

function directionTable(directions, singularValues) {
  const FIRST = 6;
  const top = singularValues[0] || 1;
  const place = h('div');
  let all = false;
  const chips = (pairs) => h('span.chips', {}, pairs.map(([token, score]) => tokenChip(data.tokens[token], { title: `${tokenText(data.tokens[token])}  ${format(score, { sign: true })}` })));
  const direction = (d, k) => [
    h('tr.end.first', {},
      h('th', { scope: 'rowgroup', rowspan: 2 },
        h('span.index', {}, String(k + 1)), h('span.sigma.num', {}, format(d.value)),
        h('span.sigma-bar', { 'aria-hidden': 'true' }, h('span', { style: { width: `${(d.value / top) * 100}%` } })),
        h('span.share', {}, `${percent(d.energy)} of OV`),
        d.separable ? null : h('span.flag', {}, 'not separable from the next: read the span')),
      h('td.sign', {}, '+'), h('td', { data: { label: 'reads' } }, chips(d.reads.plus)), h('td.to', { 'aria-hidden': 'true' }, '→'), h('td', { data: { label: 'writes' } }, chips(d.writes.plus))),
    h('tr.end', {},
      h('td.sign', {}, MINUS), h('td', { data: { label: 'reads' } }, chips(d.reads.minus)), h('td.to', { 'aria-hidden': 'true' }, '→'), h('td', { data: { label: 'writes' } }, chips(d.writes.minus))),
  ];
  function draw() {
    place.replaceChildren(
      h('table.directions', {},
        h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Singular value'), h('th', { scope: 'col' }, h('span.visually-hidden', {}, 'End')),
          h('th', { scope: 'col' }, 'Reads'), h('td', {}), h('th', { scope: 'col' }, 'Writes'))),
        (all ? directions : directions.slice(0, FIRST)).map((d, k) => h('tbody', {}, direction(d, k)))),
      directions.length > FIRST ? h('button.quiet', { type: 'button', onclick: () => { all = !all; draw(); } }, all ? `Show the first ${FIRST}` : `Show all ${directions.length} directions`) : '');
  }
  draw();
  return place;
}

function scoreTable(i) {
  let group = null;
  const rows = [];
  for (const score of data.scores) {
    const v = data.value(score.key, i);
    const scale = data.scale(score.key);
    const rank = data.rank(score.key, i);
    const values = data.values[score.key];
    const { lo, hi } = scaleOf(values, false, score.range);
    if (score.group !== group) rows.push(h('tr.group', {}, h('th', { colspan: 5, scope: 'colgroup' }, group = score.group)));
    const chance = data.payload.chance?.[score.key];
    const z = chance?.z[i];
    rows.push(h('tr', {},
      h('th', { scope: 'row', title: [score.note, score.source].filter(Boolean).join(' · ') }, score.label),
      h('td.num', {}, isNumber(v) ? h('span.swatch', { style: { background: scale.at(v).css } }) : null, formatIn(scale, v)),
      h('td.num.soft', chance ? { title: `By chance ${formatIn(scale, chance.mean[i])}: ${chance.note}` } : {}, isNumber(z) ? `z ${format(z, { sign: true, digits: 2 })}` : ''),
      h('td.place', {}, ticks(values, lo, hi, v)),
      h('td.num.soft', {}, rank ? `${rank.rank} of ${rank.of}` : '')));
  }
  return h('table.scores', {}, h('thead.visually-hidden', {}, h('tr', {}, ['Score', 'Value', 'Standard deviations above chance', 'Among all heads', 'Rank, largest first'].map((t) => h('th', { scope: 'col' }, t)))), h('tbody', {}, rows));
}

// ----------------------------------------------------------------------------------------------------------------- view: prompt

/** The attribution from each source token, of one head or summed over all. */
async function sourceValues(i = null) {
  const spec = data.prompt.head_source;
  if (!spec) return null;
  if (i !== null) return arrayRow(spec, i);
  const sum = new Float32Array(spec.shape[1]);
  for (let k = 0; k < data.count; k++) (await arrayRow(spec, k)).forEach((v, position) => { sum[position] += v; });
  return sum;
}

const BY_SOURCE = 'prompt_source';

/** Each head's attribution from one source token, kept like a score so that the map can show it; it is on no list of scores. */
async function readSource(position) {
  const values = [];
  for (let i = 0; i < data.count; i++) values.push((await arrayRow(data.prompt.head_source, i))[position]);
  data.replaceScore({
    key: BY_SOURCE, label: `Attribution from ${tokenText(data.prompt.tokens[position])}, position ${position},`, diverging: true, range: null, note: '', source: '',
  }, values);
}

function question(prompt) {
  if (!prompt.answer) return null;
  return h('p.question', {}, 'Answer ', tokenChip(prompt.answer.token), prompt.against ? [' against ', tokenChip(prompt.against.token)] : null,
    h('span.soft', {}, ` after position ${prompt.position}`));
}

/** What is explained, with its tokens as chips: "logit difference ·Mary − ·John". */
function quantity() {
  const { prompt } = data;
  if (!prompt.answer) return prompt.quantity ?? 'logit';
  const answer = tokenChip(prompt.answer.token);
  return prompt.against ? ['logit difference ', h('span.nowrap', {}, answer, ` ${MINUS} `, tokenChip(prompt.against.token))] : ['logit of ', answer];
}

/** The parts of a head's card that a prompt adds: its tokens, coloured, and the section with patterns and writes. */
function promptOnCard(i) {
  const strip = h('div.card-strip');
  const place = h('div', {}, h('p.loading', {}, 'Reading the arrays in this file …'));
  promptOfHead(i).then(({ sources, parts }) => {
    strip.replaceChildren(stripWithLegend(sources, sources
      ? `Prompt, coloured by the attribution that flows through head ${data.label(i)}` : 'Prompt'));
    place.replaceChildren(parts);
  });
  return { strip, section: h('section', {}, h('h3', {}, 'On the prompt'), place) };
}

function stripWithLegend(values, label, choice = {}) {
  const { prompt } = data;
  const scale = values ? scaleOf(values, true) : null;
  return h('div.strip', {}, tokenStrip(prompt.tokens, values, { scale, answerAt: prompt.position, label, ...choice }),
    values ? legend(scale, [...values], { label: 'Attribution' }) : null);
}

/** What head `i` does on the prompt: patterns, and over tokens its attribution by source and the size of its write. */
async function promptOfHead(i) {
  const { prompt } = data;
  const label = data.label(i);
  const read = (name) => (prompt[name] ? arrayRow(prompt[name], i) : null);
  const [sources, pattern, weighted, norms] = await Promise.all([sourceValues(i), read('pattern'), read('value_weighted'), read('write_norm')]);
  const scale = weighted ? makeScale(0, Math.max(1e-12, ...weighted), false) : null;
  const figure = (title, lead, drawing) => h('figure', {}, h('figcaption', {}, h('h4', {}, title), h('p.lead', {}, lead)), drawing);
  const parts = h('div.prompt-parts', {},
    pattern ? figure('Attention', 'Rows look at columns; 0 to 1.',
      heatmap(prompt.tokens, pattern, { scale: makeScale(0, 1, false), label: `Attention pattern of head ${label}`, say: 'attention' })) : null,
    weighted ? figure('Attention times the size of what it moves', [formula('A · ‖v W_O‖'), `; 0 to ${format(scale.hi, { digits: 2 })}.`],
      heatmap(prompt.tokens, weighted, { scale, label: `Value-weighted attention pattern of head ${label}`, say: 'moved' })) : null,
    sources ? figure('Attribution by source token', ['What each token sends through this head to the ', quantity(), '.'],
      tokenBars(prompt.tokens, [...sources], { diverging: true, label: `Attribution by source token of head ${label}`, say: 'sends' })) : null,
    norms ? figure('Size of the write', 'The norm of what the head adds to the residual stream at each token.',
      tokenBars(prompt.tokens, [...norms], { diverging: false, label: `Write norms of head ${label}`, say: 'write norm' })) : null);
  return { sources, parts };
}

const COMPONENT_NAMES = {
  embedding: 'Token embedding', position: 'Position embedding', head: 'Attention heads', value_bias: 'Value biases',
  b_O: 'Attention output biases', mlp: 'MLPs', norm_bias: 'Final norm bias', post_norm: 'Post-norms', b_U: 'Unembedding bias',
};
const IN_LAYER = { head: 'heads', value_bias: 'value biases', b_O: 'output bias', mlp: 'MLP', post_norm: 'post-norm' };

/** Rows of the account: summed by kind, or as the stream runs. */
function accountRows(components, by) {
  if (by === 'layer') {
    return components.map((c) => ({
      name: c.layer === null || c.layer === undefined ? COMPONENT_NAMES[c.component] ?? c.component : `Layer ${c.layer} ${IN_LAYER[c.component] ?? c.component}`,
      value: c.value, layer: c.component === 'head' ? c.layer : null,
    }));
  }
  const kinds = new Map();
  for (const c of components) kinds.set(c.component, (kinds.get(c.component) ?? 0) + c.value);
  return [...kinds].map(([kind, value]) => ({ name: COMPONENT_NAMES[kind] ?? kind, value, layer: null }));
}

function strongestOf(layer) {
  const values = data.prompt.head_value;
  let best = layer * data.nHeads;
  for (let i = best; i < (layer + 1) * data.nHeads; i++) if (Math.abs(values[i]) > Math.abs(values[best])) best = i;
  return best;
}

function accountTable() {
  const { prompt } = data;
  const rows = accountRows(prompt.components, state.accountBy);
  let sum = 0;
  const steps = rows.map((row) => ({ ...row, from: sum, to: (sum += row.value) }));
  const marks = [0, prompt.total, prompt.logit, ...steps.map((step) => step.to)].filter(isNumber);
  const [lo, hi] = [Math.min(...marks), Math.max(...marks)];
  const at = (v) => ((v - lo) / (hi - lo || 1)) * 100;
  const digits = scaleOf(rows.map((row) => row.value), true);
  const bar = (from, to, kind) => h('td.track', {}, h('span.zero-line', { style: { left: `${at(0)}%` } }),
    h(`span.step.${kind}`, { style: { left: `${at(Math.min(from, to))}%`, width: `${Math.max(0.3, Math.abs(at(to) - at(from)))}%` } }));
  return h(`table.account.by-${state.accountBy}`, {},
    h('caption.visually-hidden', {}, `The account of the ${prompt.quantity}`),
    h('thead.visually-hidden', {}, h('tr', {}, ['Component', 'Running sum', 'Value'].map((t) => h('th', { scope: 'col' }, t)))),
    h('tbody', {}, steps.map((step) => h('tr', {},
      h('th', { scope: 'row' }, step.name, step.layer !== null && prompt.head_value ? [' ', h('span.most', {}, headLink(strongestOf(step.layer)))] : null),
      bar(step.from, step.to, step.value < 0 ? 'down' : 'up'), h('td.num', {}, formatIn(digits, step.value, { more: 1 }))))),
    h('tfoot', {},
      h('tr.total', {}, h('th', { scope: 'row' }, 'Sum of the parts'), bar(0, prompt.total, 'whole'), h('td.num', {}, format(prompt.total, { sign: true, digits: 5 }))),
      h('tr', {}, h('th', { scope: 'row' }, 'The model’s own'), bar(0, prompt.logit, 'own'), h('td.num', {}, format(prompt.logit, { sign: true, digits: 5 }))),
      h('tr', {}, h('th', { scope: 'row' }, 'Residual', h('span.soft', {}, `, own ${MINUS} sum`)), h('td', {}), h('td.num', {}, format(prompt.residual, { sign: true })))));
}

function promptView() {
  const { prompt } = data;
  const strip = h('div');
  const chosen = h('div');
  const explained = Boolean(prompt.components?.length && isNumber(prompt.total));
  const mapKey = () => (state.promptSource === null ? 'prompt_value' : BY_SOURCE);
  const mostFor = (sign) => data.values[mapKey()].map((v, i) => [v, i]).filter(([v]) => v * sign > 0).sort((a, b) => (b[0] - a[0]) * sign).slice(0, 6);
  if (state.promptHead === null) {
    state.promptHead = prompt.head_value ? prompt.head_value.reduce((best, v, i, all) => (Math.abs(v) > Math.abs(all[best]) ? i : best), 0) : 0;
  }
  const map = prompt.head_value ? headMap({ key: mapKey, label: 'Attribution of each head on the prompt' }) : null;
  const account = h('div');
  const toggle = h('div.segmented', { role: 'group', 'aria-label': 'Rows of the account' }, [['kind', 'By kind'], ['layer', 'By layer']].map(([by, text]) =>
    h('button', { type: 'button', data: { by }, onclick: () => { state.accountBy = by; drawAccount(); } }, text)));
  function drawAccount() {
    account.replaceChildren(accountTable());
    for (const button of toggle.children) button.setAttribute('aria-pressed', String(button.dataset.by === state.accountBy));
  }
  const headChoice = h('select', {
    id: 'prompt-head', onchange: (event) => { state.promptHead = Number(event.target.value); drawHead(); },
  }, Array.from({ length: data.count }, (_, i) => h('option', { value: i, selected: i === state.promptHead }, data.label(i))));
  async function drawHead() {
    const i = state.promptHead;
    headChoice.value = String(i);
    const { parts } = await promptOfHead(i);
    if (i !== state.promptHead) return;
    chosen.replaceChildren(parts, h('p', {}, headLink(i, { text: `All of head ${data.label(i)} ›`, className: 'plain-link' })));
  }
  const ranking = (title, list) => list.length ? h('div', {}, h('h4', {}, title), h('ol.ranking', {}, list.map(([v, i]) =>
    h('li', {}, headLink(i), h('span.num', {}, formatIn(data.scale(mapKey()), v)))))) : null;
  const legendPlace = h('div');
  const rankings = h('div.rankings');
  const mapLead = h('p.lead');
  async function chooseSource(position) {
    const next = position === state.promptSource ? null : position;
    if (next !== null) await readSource(next);
    state.promptSource = next;
    drawStrip();
    drawMap();
  }
  function drawMap() {
    if (!map) return;
    map.update();
    legendPlace.replaceChildren(legend(data.scale(mapKey()), data.values[mapKey()], { label: 'Attribution' }));
    rankings.replaceChildren(...[ranking('Most for', mostFor(1)), ranking('Most against', mostFor(-1))].filter(Boolean));
    const source = state.promptSource;
    mapLead.replaceChildren(...(source === null
      ? ['What each head moves from its source tokens (its value bias is a line of the account). Choose a token of the prompt to see what the heads carry from it.']
      : ['What each head moves from ', tokenChip(prompt.tokens[source]), ` at position ${source}. `,
        h('button.quiet', { type: 'button', onclick: () => chooseSource(source) }, 'All tokens')]));
  }
  async function drawStrip() {
    const values = await sourceValues();
    const focused = strip.contains(document.activeElement);
    strip.replaceChildren(stripWithLegend(values, 'Prompt, coloured by the attribution that flows from each token through all heads',
      values ? { choose: chooseSource, chosen: state.promptSource } : {}));
    if (focused) strip.querySelector('[aria-pressed="true"], button')?.focus();
  }
  const node = h('div.prompt', {},
    h('header', {}, h('h2', {}, 'The prompt'), question(prompt),
      h('p.facts', {}, `${prompt.tokens.length} tokens. `, prompt.bos_added ? 'A beginning-of-text token was put in front of the prompt; it is part of every number here.' : 'No token was added to the prompt.')),
    strip,
    explained ? h('div.prompt-columns', {},
      h('section', {}, h('h3', {}, 'The account'), h('p.lead', {}, ['Every part of the model that adds to the ', quantity(), ', through the final norm at its actual scale. This is the direct effect: what later layers would make up for is not in it.']), toggle, account),
      map ? h('section', {}, h('h3', {}, 'Heads'), mapLead, map.node, legendPlace, rankings) : null) : null,
    h('section', {}, h('h3', {}, 'One head on this prompt'), h('div.field', {}, h('label', { for: 'prompt-head' }, 'Head'), headChoice), chosen));
  function update() {
    drawMap();
    if (explained) drawAccount();
    drawStrip();
    drawHead();
    updateTray();
  }
  return { node, title: 'Prompt', update, focus: 'h2' };
}

// ---------------------------------------------------------------------------------------------------------------- view: compare

function compareView(heads) {
  const place = h('div', {}, h('p.loading', {}, 'Reading the cards in this file …'));
  const node = h('div.compare', {}, h('nav.card-nav', { 'aria-label': 'Heads' }, h('a', { href: '#', data: { nav: 'atlas' } }, '← Atlas')),
    h('h2', {}, heads.length ? `Heads ${heads.map(data.label).join(', ')}` : 'No heads to compare'), place);
  const draw = async () => {
    const cards = await data.cards();
    const columns = heads.map((i) => h('article.compare-card', {},
      h('h3', {}, headLink(i, { text: `Head ${data.label(i)}`, className: 'plain-link' })),
      cards[i].singular_values.length ? [spark(cards[i].singular_values), h('p.soft', {}, spectrumSentence(cards[i]))] : h('p.absent', {}, 'The weights of this head hold NaN or infinity.'),
      h('p.evidence', {}, evidence(cards[i], i)),
      (cards[i].directions ?? []).slice(0, 3).map((d, k) => h('div.short-direction', {},
        h('div.soft.num', {}, `direction ${k + 1}, ${format(d.value)}, ${percent(d.energy)}${d.separable ? '' : ', not separable'}`),
        ['plus', 'minus'].map((end) => h('div.chips', {}, h('span.sign', {}, end === 'plus' ? '+' : MINUS),
          d.reads[end].slice(0, 4).map(([token]) => tokenChip(data.tokens[token])), h('span.soft', {}, '→'),
          d.writes[end].slice(0, 4).map(([token]) => tokenChip(data.tokens[token]))))))));
    const rows = [];
    let group = null;
    for (const score of data.scores) {
      if (score.group !== group) rows.push(h('tr.group', {}, h('th', { colspan: heads.length + 1, scope: 'colgroup' }, group = score.group)));
      rows.push(h('tr', {}, h('th', { scope: 'row', title: score.note }, score.label), heads.map((i) => {
        const v = data.value(score.key, i);
        return h('td.num', {}, isNumber(v) ? h('span.swatch', { style: { background: data.scale(score.key).at(v).css } }) : null, formatIn(data.scale(score.key), v));
      })));
    }
    place.replaceChildren(h('div.compare-cards', {}, columns),
      h('section', {}, h('h3', {}, 'Scores'), h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Scores side by side' }, h('table.scores', {},
        h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Score'), heads.map((i) => h('th.num', { scope: 'col' }, data.label(i))))), h('tbody', {}, rows)))));
    updateTray();
  };
  return { node, title: 'Comparison', update: draw, focus: 'h2' };
}

const tray = h('div.tray', { role: 'region', 'aria-label': 'Comparison', hidden: true });

function toggleCompare(i) {
  if (!state.compare.delete(i)) state.compare.add(i);
  view?.update();
}

function updateTray() {
  const heads = [...state.compare];
  tray.hidden = heads.length === 0 || state.route.name === 'compare';
  tray.replaceChildren(h('span', {}, 'Compare'), h('span.tray-heads', {}, heads.map((i) => h('button.tray-head', {
    type: 'button', 'aria-label': `Remove head ${data.label(i)} from the comparison`, onclick: () => toggleCompare(i),
  }, data.label(i), h('span', { 'aria-hidden': 'true' }, ' ×')))),
  heads.length > 1 ? h('a.button', { href: `#compare/${heads.map(data.label).join(',')}` }, 'Side by side') : h('span.soft', {}, 'mark another head'),
  h('button.quiet', { type: 'button', onclick: () => { state.compare.clear(); view.update(); } }, 'Clear'));
}

// -------------------------------------------------------------------------------------------------------------------- the header

const FAMILIES = { gpt2: 'GPT-2 style', llama: 'Llama style', gptneox: 'GPT-NeoX style' };

function pageHeader() {
  const { meta } = data;
  const facts = [
    FAMILIES[meta.family] ?? meta.family,
    data.grouped ? `${meta.n_layers} layers × ${meta.n_heads} query heads on ${plural(meta.n_kv_heads, 'key/value head')}` : `${meta.n_layers} layers × ${meta.n_heads} heads`,
    `d_model ${meta.d_model}`, `d_head ${meta.d_head}`, meta.norm,
    meta.positions === 'none' ? 'no positions' : `${meta.positions} positions`,
    meta.n_vocab ? `${wholeNumber(meta.n_vocab)} tokens, ${meta.tied ? 'tied' : 'untied'}` : null,
    meta.n_parameters ? parameters(meta.n_parameters) : null,
  ].filter(Boolean);
  const themeButton = h('button.quiet.theme', { type: 'button', onclick: toggleTheme }, '');
  themeButton.id = 'theme';
  return h('header.masthead', {},
    h('div.masthead-line', {}, h('a.wordmark', { href: '#', data: { nav: 'atlas' } }, 'ov_circuits'),
      h('nav.views', { 'aria-label': 'Views' }, h('a', { href: '#', data: { nav: 'atlas' } }, 'Atlas'),
        data.prompt ? h('a', { href: '#prompt', data: { nav: 'prompt' } }, 'Prompt') : null),
      themeButton),
    h('h1', {}, meta.model),
    h('p.facts', {}, facts.map((fact, k) => [h('span', {}, k < facts.length - 1 ? `${fact}\u2002·` : fact), '\u2002'])),
    h('div.pledges', {},
      h('details', {}, h('summary', {}, 'Weights: ', h('b', {}, meta.view)), h('div.pop', {}, h('p', {}, meta.view_note), meta.source ? h('p.soft', {}, 'From ', h('code', {}, meta.source)) : null)),
      certificate(meta.certificate),
      meta.notes?.length ? h('details', {}, h('summary', {}, plural(meta.notes.length, 'note')), h('div.pop', {}, h('ul', {}, meta.notes.map((note) => h('li', {}, note))))) : null));
}

function parameters(n) {
  if (n >= 1e9) return `${format(n / 1e9, { digits: 3 })} B parameters`;
  return n >= 1e6 ? `${format(n / 1e6, { digits: 3 })} M parameters` : `${wholeNumber(n)} parameters`;
}

function certificate(made) {
  if (!made) return h('span.pledge.soft', {}, 'Identities not checked');
  const counted = made.checks.filter((check) => check.passed !== null);
  const passed = counted.filter((check) => check.passed).length;
  const skipped = made.checks.length - counted.length;
  const word = (check) => (check.passed === null ? 'not checked' : check.passed ? 'holds' : 'fails');
  return h('details', {},
    h(made.passed ? 'summary.good' : 'summary.bad', {}, made.passed ? '✓ ' : '✗ ', `${passed} of ${plural(counted.length, 'identity', 'identities')} hold${counted.length === 1 ? 's' : ''}`, skipped ? h('span.soft', {}, `, ${skipped} not checked`) : null),
    h('div.pop.wide', {}, h('table.certificate', {},
      h('thead', {}, h('tr', {}, ['Identity', '', 'Error', 'Limit'].map((t) => (t ? h('th', { scope: 'col' }, t) : h('td', {}))))),
      h('tbody', {}, made.checks.map((check) => h('tr', {},
        h('th', { scope: 'row' }, check.name, check.detail ? h('span.soft.detail', {}, check.detail) : null),
        h(`td.${check.passed === null ? 'soft' : check.passed ? 'good' : 'bad'}`, {}, word(check)),
        h('td.num', {}, format(check.value, { digits: 2 })), h('td.num', {}, format(check.limit, { digits: 2 }))))))));
}

// ----------------------------------------------------------------------------------------------------------------- theme, routes

const THEME_KEY = 'ov-circuits-theme';

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  ramps = null;
  nameTheme();
  view?.update();
}

function nameTheme() {
  document.getElementById('theme').textContent = document.documentElement.dataset.theme === 'dark' ? 'Light page' : 'Dark page';
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  // In a notebook frame or a private window there is no storage; the choice then lasts as long as the page.
  try { localStorage.setItem(THEME_KEY, theme); } catch { /* nothing to keep it in */ }
  setTheme(theme);
}

function parseRoute(hash) {
  const text = decodeURIComponent(hash.replace(/^#/, ''));
  const one = (label) => {
    const match = /^(?:L(\d+)H(\d+)|(\d+)\.(\d+))$/i.exec(label.trim());
    return match ? data.index(Number(match[1] ?? match[3]), Number(match[2] ?? match[4])) : null;
  };
  if (text === 'prompt' && data.prompt) return { name: 'prompt' };
  if (text.startsWith('compare/')) return { name: 'compare', heads: text.slice(8).split(',').map(one).filter((i) => i !== null) };
  const head = one(text);
  if (head !== null) return { name: 'head', head };
  return { name: 'atlas', unknown: text && text !== 'main-content' ? text : null };
}

/** Moves to a view through the address, so that back works; where there is no address (some notebook frames), directly. */
function go(route) {
  try {
    if (location.hash.replace(/^#/, '') !== route) {
      location.hash = route;
      return;
    }
  } catch { /* a frame without an address */ }
  show(parseRoute(route));
}

let view = null;
let main = null;
let atlasScroll = 0;

function show(route) {
  hideTooltip();
  if (state.route?.name === 'atlas') atlasScroll = scrollY;
  const first = state.route === null;
  state.route = route;
  view = {
    atlas: () => atlasView(), head: () => headView(route.head), prompt: () => promptView(), compare: () => compareView(route.heads),
  }[route.name]();
  main.replaceChildren(...[
    route.unknown ? h('p.message', { role: 'alert' }, `There is no head “${clip(route.unknown, 40)}” in this model; this is the atlas.`) : null, view.node,
  ].filter(Boolean));
  document.body.dataset.view = route.name;
  document.title = route.name === 'atlas' ? data.payload.title : `${view.title} · ${data.payload.title}`;
  for (const link of document.querySelectorAll('.views a')) {
    if (link.dataset.nav === route.name) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  view.update();
  if (first) return;
  if (view.focus) {
    const heading = view.node.querySelector(view.focus);
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
  scrollTo(0, route.name === 'atlas' ? atlasScroll : Math.min(scrollY, main.offsetTop - 16));
}

async function start() {
  const page = document.getElementById('page');
  if (typeof DecompressionStream === 'undefined') {
    page.replaceChildren(h('p.loading', {}, 'This page needs a browser of 2023 or later: it unpacks its data with DecompressionStream.'));
    return;
  }
  data = prepare(JSON.parse(await blockText('core')));
  const keys = data.scores.map((score) => score.key);
  state.score = ['eigen_copying_full', 'eigen_copying_ov'].find(data.has) ?? keys[0];
  state.x = state.score;
  state.y = keys.find((key) => key.includes('frobenius')) ?? keys.find((key) => key !== state.x) ?? state.x;
  main = h('main', { id: 'main-content', tabindex: '-1' });
  page.replaceChildren(pageHeader(), main, h('footer.foot', {}, `ov_circuits ${data.meta.version}. One file, no requests: everything shown is inside it.`), tray, tooltip);

  nameTheme();

  addEventListener('hashchange', () => {
    if (location.hash !== '#main-content') show(parseRoute(location.hash));
  });
  document.addEventListener('click', (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    if (link.classList.contains('skip')) main.focus();
    else go(link.getAttribute('href').slice(1));
  });
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    hideTooltip();
    const open = document.querySelector('details[open] .pop')?.parentElement;
    if (open) { open.open = false; open.querySelector('summary').focus(); }
    else if (state.route.name !== 'atlas' && !/INPUT|SELECT/.test(event.target.tagName)) go('');
  });
  // One explanation open at a time; a click elsewhere closes it.
  document.addEventListener('click', (event) => {
    for (const open of document.querySelectorAll('.pledges details[open]')) if (!open.contains(event.target)) open.open = false;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', (event) => {
    let kept = null;
    try { kept = localStorage.getItem(THEME_KEY); } catch { /* no storage */ }
    if (!kept) setTheme(event.matches ? 'dark' : 'light');
  });
  // Paper is light. The choice of the reader comes back after.
  let onScreen = null;
  addEventListener('beforeprint', () => { onScreen = document.documentElement.dataset.theme; if (onScreen === 'dark') setTheme('light'); });
  addEventListener('afterprint', () => { if (onScreen === 'dark') setTheme('dark'); });

  show(parseRoute(location.hash));
  document.documentElement.dataset.ready = 'true';
}

start().catch((error) => {
  document.getElementById('page').replaceChildren(h('p.loading', { role: 'alert' }, `This page could not be read: ${error.message}`));
  throw error;
});

})();
