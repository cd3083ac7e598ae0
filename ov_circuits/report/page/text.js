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
