const MOVED_KINDS = {
  first: 'first token', self: 'itself', previous: 'token before', same_token: 'same token', after_same_token: 'after same token', punctuation: 'punctuation', other: 'elsewhere',
};

/** What a card shows of a text: examples with their source and destination, and where the head attends. */
function examplesSection({ label, examples, charts }) {
  const own = examples?.heads[label];
  if (!own) return null;
  const { facts } = examples;
  const lists = [
    ['write', 'strongest', 'Largest writes'], ['logit', 'strongest', 'Raises the next token most'], ['logit', 'most negative', 'Lowers it most'],
    ['write', 'decile', 'By tenths of the write'], ['logit', 'decile', 'By tenths of the logit'],
  ].map(([measure, kind, title]) => ({ title, rows: own.examples.filter((row) => row.measure === measure && row.kind === kind) })).filter(({ rows }) => rows.length);
  const place = h('ol.examples');
  const tabs = h('div.segmented.wraps', { role: 'group', 'aria-label': 'Which examples' }, lists.map(({ title, rows }) => h('button', {
    type: 'button', onclick: (event) => draw(rows, event.currentTarget),
  }, title)));
  let chosen = null;
  function draw(rows, button) {
    chosen = [rows, button];
    for (const other of tabs.children) other.setAttribute('aria-pressed', String(other === button));
    place.replaceChildren(...rows.map(exampleRow));
  }
  if (lists.length) {
    draw(lists[0].rows, tabs.firstChild);
    charts.push(() => draw(...chosen));
  }
  const { numbers } = own;
  return section('On a text', [`${wholeNumber(facts.positions)} positions of ${facts.corpus}. `, 'In each line the head reads the ',
    h('mark.source', {}, 'source'), ' that it takes most from and writes at the ', h('mark.destination', {}, 'destination'), '; below stands what it attends to most.'],
  tabs, place,
  h('div.behaviour', {},
    barList('Attention by distance', 'how many tokens back', own.distance.map(([bin, share]) => ({ name: bin.replace('-', '–'), parts: [share] }))),
    barList('By kind of source', [swatchOf('attention'), ' of attention, ', swatchOf('moved'), ' of what it moves'],
      facts.kinds.map((kind, k) => ({ name: MOVED_KINDS[kind] ?? kind, parts: [own.attention[k], own.moved[k]] }))),
    h('div', {}, h('h4', {}, 'On average'), h('dl.means', {}, [
      ['Size of the write', format(numbers.write)],
      ['To the true next token’s logit', format(numbers.logit, { sign: true })],
      ['Loss saved, nats', withError(numbers.loss_saved, numbers.loss_saved_se)],
      ['Entropy of attention, nats', format(numbers.entropy)], ['Distance, tokens', format(numbers.distance)],
    ].map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd.num', {}, value)))))));
}

/** A number with its standard error, both to the error's first digit. */
function withError(value, error) {
  if (!isNumber(value) || !isNumber(error) || error <= 0 || error < 1e-5) return format(value, { sign: true });
  const digits = Math.max(0, -Math.floor(Math.log10(error)));
  return `${value < 0 ? MINUS : '+'}${Math.abs(value).toFixed(digits)} ± ${error.toFixed(digits)}`;
}

const swatchOf = (kind) => h(`span.swatch.of-${kind}`, { 'aria-hidden': 'true' });

/** Shares as bars: one or two to a row, all on one scale from zero to the largest. */
function barList(title, lead, rows) {
  const most = Math.max(1e-12, ...rows.flatMap(({ parts }) => parts).filter(isNumber));
  return h('div', {}, h('h4', {}, title), h('p.hint', {}, lead), h('table.shares', {}, h('thead.visually-hidden', {}, h('tr', {}, ['Where', 'Bar', 'Share'].map((t) => h('th', { scope: 'col' }, t)))),
    h('tbody', {}, rows.map(({ name, parts }) => h('tr', {}, h('th', { scope: 'row' }, name),
      h('td.share-bars', {}, parts.map((share, k) => h(`div.share-bar.of-${k ? 'moved' : 'attention'}`, { style: { width: `${(100 * (share ?? 0)) / most}%` } }))),
      h('td.num', {}, parts.map((share) => percent(share ?? 0)).join(' · ')))))));
}

/** Running text: spaces stay spaces, what does not show is marked. */
function prose(text) {
  const runs = [];
  for (const character of text) {
    const mark = character === ' ' ? null : markFor(character, EMOJI.test(text));
    if (mark !== null) runs.push(h(mark.length > 1 ? 'span.mark.code' : 'span.mark', {}, mark));
    else if (typeof runs.at(-1) === 'string') runs[runs.length - 1] += character;
    else runs.push(character);
  }
  return runs;
}

const markedToken = (kind, text) => h(`mark.${kind}`, {}, text === '' ? tokenChip(text) : prose(text));

function exampleRow(row) {
  const value = h('span.num', { title: `part from the source ${format(row.part)}` }, format(row.value, { sign: row.measure === 'logit' }));
  const destination = (before) => [before, row.source_position === row.position
    ? h('mark.source.destination', {}, prose(row.destination)) : markedToken('destination', row.destination), prose(row.after)];
  // Where the source stands in the text that is shown anyway, it is marked there; else its own surroundings come first.
  const inside = placeInside(row);
  // A line begins with a word: the space before it would stand out of line.
  const head = (text) => prose(text.replace(/^ /, ''));
  return h('li.example', {},
    h('span.example-value', {}, row.kind === 'decile' ? h('span.soft', {}, `${row.decile} `) : null, value),
    h('div.example-text', {},
      inside === null && row.source_position !== row.position
        ? h('div.example-source', {}, h('bdi.prose', { dir: 'ltr' }, '… ', head(row.source_before), markedToken('source', row.source), prose(row.source_after), ' …'),
          h('span.soft.nowrap', {}, ` ${row.position - row.source_position} back`)) : null,
      h('bdi.prose', { dir: 'ltr' }, destination(inside === null ? head(row.before)
        : [head(row.before.slice(0, inside)), markedToken('source', row.source), prose(row.before.slice(inside + row.source.length))])),
      attendedTokens(row)));
}

/** Where the destination attends: the sources with most of it, the one marked in the text among them, and what is left. */
function attendedTokens(row) {
  const toSource = row.source_position === null ? null : row.position - row.source_position;
  const tokens = row.attended.some(([, , , back]) => back === toSource) ? row.attended
    : [...row.attended, [row.source, row.attention, row.part, toSource]];
  const scale = makeScale(0, 1, false);
  const left = Math.max(0, 1 - tokens.reduce((sum, [, attention]) => sum + attention, 0));
  return h('ul.attended', { 'aria-label': 'Attends to' }, tokens.map(([text, attention, part, back]) => {
    const place = back === null ? 'before the text' : back === 0 ? 'the destination itself' : `${back} back`;
    const told = `${place}, part ${format(part, { sign: row.measure === 'logit' })}`;
    return h(back === toSource ? 'li.source' : 'li', { title: `${tokenText(text)}: ${told}` },
      tokenChip(text, { tint: scale.at(attention), title: '' }), ' ', h('span.num', {}, percent(attention)), h('span.visually-hidden', {}, `, ${told}`));
  }), left >= 0.01 ? h('li', {}, 'elsewhere ', h('span.num', {}, percent(left))) : null);
}

const TOKENS_BEFORE = 16;

/** Where in the text before the destination the source begins; null where it is not there, or not for certain. */
function placeInside({ before, destination, after, source_before: left, source, source_after: right, position, source_position: at }) {
  if (position - at > TOKENS_BEFORE || position === at || source === '') return null;
  const whole = before + destination + after;
  for (const lead of [left, '']) {
    const found = whole.indexOf(lead + source + right);
    if (found >= 0 && found === whole.lastIndexOf(lead + source + right)) {
      const start = found + lead.length;
      return start + source.length <= before.length ? start : null;
    }
  }
  return null;
}
