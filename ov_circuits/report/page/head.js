// A group of more heads than this does not fit side by side.
const GROUP_COLUMNS = 9;

function headView(i) {
  const label = data.label(i);
  const map = headMap({ compact: true, current: i, label: `Map of heads, ${label} is open` });
  const legendPlace = h('div');
  const body = h('div.card-body', {}, h('p.loading', {}, 'Reading the cards in this file …'));
  const previous = i > 0 ? i - 1 : null;
  const next = i < data.count - 1 ? i + 1 : null;
  const siblings = data.grouped
    ? Array.from({ length: data.groupSize }, (_, k) => i - data.headOf(i) + data.groupOf(i) * data.groupSize + k).filter((k) => k !== i) : [];
  const compareButton = h('button.quiet', { type: 'button', onclick: () => toggleCompare(i) });
  const node = h('div.card', {},
    h('aside.card-aside', { 'aria-label': 'All heads' }, map.node, legendPlace, h('p.hint', {}, data.byKey.get(state.score).label)),
    h('article', {},
      h('nav.card-nav', { 'aria-label': 'Heads' },
        h('a', { href: '#', data: { nav: 'atlas' } }, '← Atlas'),
        h('span', {}, previous !== null ? h('a', { href: `#${data.label(previous)}`, rel: 'prev', title: 'Previous head' }, `‹ ${data.label(previous)}`) : '',
          ' ', next !== null ? h('a', { href: `#${data.label(next)}`, rel: 'next', title: 'Next head' }, `${data.label(next)} ›`) : '')),
      h('header.card-head', {},
        h('h2', {}, `Head ${label}`),
        h('p.facts', {}, `layer ${data.layerOf(i)}, of 0 to ${data.meta.n_layers - 1}`,
          data.grouped ? [` · key/value head ${data.groupOf(i)}, shared with `, siblings.map((k, n) => [n ? ', ' : '', headLink(k)]),
            siblings.length < GROUP_COLUMNS ? [' · ', h('a.plain-link', { href: `#compare/${[i, ...siblings].sort((a, b) => a - b).map(data.label).join(',')}` }, 'the group side by side ›')] : null] : null),
        compareButton),
      body));
  // What is drawn in colours of the theme: drawn again when that changes.
  const charts = [];
  function update() {
    map.update();
    legendPlace.replaceChildren(legend(data.scale(state.score), [], { label: 'Colours of the map' }));
    compareButton.textContent = state.compare.has(i) ? 'Remove from comparison' : 'Add to comparison';
    charts.forEach((draw) => draw());
    updateTray();
  }
  Promise.all([data.cards(), data.composition(), data.spaces(), data.examples()]).then(([cards, composition, spaces, examples]) => {
    const card = cards[i];
    const head = { i, label, card, composition, spaces, examples, charts, onPrompt: data.prompt ? promptOnCard(i) : null };
    const sections = card.singular_values.length ? CARD_SECTIONS : [notFinite, promptStripSection, promptSection];
    body.replaceChildren(...sections.map((make) => make(head)).filter(Boolean));
    if (head.onPrompt) charts.push(head.onPrompt.draw);
    update();
  });
  return { node, title: `Head ${label}`, update, focus: 'h2' };
}

/* One function a section, in the order in which a card is read. Each takes the head (its place, label and card, the sections of
 * the payload, and `charts`, whose functions are called again when the theme changes) and gives an element, or null. */
const CARD_SECTIONS = [
  evidenceSection, promptStripSection, directionsSection, pairsSection, examplesSection, spectrumSection, linksSection, spacesSection, promptSection, scoresSection,
];

const NO_EMBEDDING = 'This checkpoint holds no embeddings, so nothing of this head can be read in tokens or in the vocabulary space.';

function notFinite() {
  return h('p.absent', {}, 'The weights of this head hold NaN or infinity: it has no spectrum, no directions and no scores.');
}

function evidenceSection({ card }) {
  const parts = evidence(card);
  return parts.length ? h('p.evidence', {}, parts) : null;
}

function promptStripSection({ onPrompt }) {
  return onPrompt?.strip;
}

function promptSection({ onPrompt }) {
  return onPrompt?.section;
}

function directionsSection({ card }) {
  return section('Singular directions', card.directions?.length
    ? 'Each direction of OV reads one contrast of tokens and writes another. The sign of a pair is arbitrary, so both ends are shown: where + is read, + is written. They count from 0, as in head.reads(direction=…) and ablate --direction.' : null,
  card.directions?.length ? directionTable(card.directions, card.singular_values) : h('p.absent', {}, NO_EMBEDDING));
}

function pairsSection({ card, label }) {
  if (!card.directions) return null;
  const title = 'Strongest token → token';
  if (!card.pairs) {
    return section(title, null, h('p.absent', {}, 'Not read for this head. ', h('code', {}, `ov-circuits pairs MODEL ${label}`), ' reads it in about a second; ',
      h('code', {}, 'ov-circuits report MODEL --pairs all'), ' puts all heads on the page.'));
  }
  const list = (end, name) => h('div', {}, h('h4', {}, name), h('ol.pairs', {}, (card.pairs[end] ?? []).map(([source, output, value]) =>
    h('li', {}, h('span.pair', {}, tokenChip(data.tokens[source]), h('span.soft', {}, ' → '), tokenChip(data.tokens[output])), h('span.num', {}, format(value, { sign: true }))))));
  return section(title, ['The largest and smallest entries of ', formula('W_E W_V W_O W_U'), ' over all pairs of tokens: what full attention to the first token does to the logit of the second, up to the norms’ scales.'],
    h('div.pair-columns', {}, list('positive', 'Raises most'), list('negative', 'Lowers most')));
}

function spectrumSection({ card, label, charts }) {
  const spectrum = spectrumChart(card, label);
  const planes = [];
  if (card.eigenvalues_ov) planes.push(['Residual space', 'W_V W_O', eigenvalueChart(card.eigenvalues_ov, label, 'OV')]);
  if (card.eigenvalues_full) planes.push(['Vocabulary space', 'W_E W_V W_O W_U', eigenvalueChart(card.eigenvalues_full, label, 'full OV')]);
  charts.push(spectrum.draw, ...planes.map(([, , plane]) => plane.draw));
  const band = card.null_low?.length ? [' The grey band is chance: ', withFormulas(data.meta.spectrum_null), '.'] : null;
  return h('div.chart-row', {},
    h('section', {}, h('h3', {}, 'Spectrum'), h('p.lead', {}, spectrumSentence(card), band), spectrum.node),
    h('section.planes', {}, h('h3', {}, 'Eigenvalues'),
      h('p.lead', {}, 'Positive ones (orange) copy what is read, negative ones (blue) push against it. OV is not normal: a large eigenvalue need not mean a large effect.'),
      h('div.plane-row', {}, planes.map(([title, of, plane]) => h('figure', {}, h('figcaption', {}, title, h('span.soft', {}, ', ', formula(of))), plane.node))),
      card.eigenvalues_full ? null : h('p.absent', {}, NO_EMBEDDING)));
}

function linksSection({ i, label, composition }) {
  if (!composition) return null;
  const SHOWN = 6;
  const side = (own, other, title, none) => {
    const paths = composition.paths.filter((path) => path[own] === i).slice(0, SHOWN);
    return h('div', {}, h('h4', {}, title), paths.length ? h('table.links', {},
      h('thead', {}, h('tr', {}, [['Head'], ['Input'], ['Value', 'num'], ['z', 'num']].map(([t, c]) => h(c ? `th.${c}` : 'th', { scope: 'col' }, t)))),
      h('tbody', {}, paths.map((path) => h(composition.flagged(path) ? 'tr.flagged' : 'tr', {},
        h('th', { scope: 'row' }, headLink(path[other])), h('td', {}, kindBadge(path.kind)),
        h('td.num', { title: `By chance ${format(path.chance)}, z ${format(path.z, { sign: true, digits: 2 })} against random rotations` }, format(path.value)),
        h('td.num', {}, format(path.paired, { sign: true, digits: 2 })))))) : h('p.soft', {}, none));
  };
  return section('Composition', ['Which earlier heads write what this head reads, and which later heads read what it writes. z counts against all pairs of the same kind; ',
    h('b', {}, 'bold'), ' ones stand out at a false discovery rate of 5\u202f%. ', h('a.plain-link', { href: `#paths/${label}` }, 'Its paths as a graph ›')],
  h('div.link-columns', {},
    side('to', 'from', 'Reads from', 'No head writes before this layer.'), side('from', 'to', 'Feeds', 'No head reads after this layer.')));
}

const KIND_NAMES = { Q: 'query', K: 'key', V: 'value' };
const kindBadge = (kind) => h(`span.kind.kind-${kind}`, { title: `${kind}-composition: the later head’s ${KIND_NAMES[kind]} input` }, kind);

function spacesSection({ i, label, spaces, charts }) {
  if (!spaces) return null;
  const near = spaces.neighbours?.[i] ?? [];
  const maps = ['write', 'read'].map((name) => {
    const made = spaceChart(spaces[name], i, `Map of all heads by what they ${name}, head ${label} marked`);
    charts.push(made.draw);
    const [first, second] = spaces.shares[name];
    return h('figure', {}, h('figcaption', {}, name === 'write' ? 'By what they write' : 'By what they read',
      h('span.soft', {}, `, ${percent((first ?? 0) + (second ?? 0))} of the variance`)), made.node);
  });
  return section('Among all heads', 'Each dot is a head; near ones write into (read from) similar directions of the stream: the two leading principal components of the projections onto these spaces, coloured by layer, the last ones strongest. Two axes hold only a small part of so many dimensions.',
    h('div.spaces', {}, h('div.plane-row', {}, maps), near.length ? h('div', {}, h('h4', {}, 'Shares most write directions with'), h('table.links', {},
      h('thead', {}, h('tr', {}, [['Head'], ['Directions', 'num'], ['z', 'num']].map(([t, c]) => h(c ? `th.${c}` : 'th', { scope: 'col' }, t)))),
      h('tbody', {}, near.map(([other, value, share, z]) => h('tr', {}, h('th', { scope: 'row' }, headLink(other)),
        h('td.num', { title: `${percent(share)} of the smaller space` }, format(value)), h('td.num', {}, format(z, { sign: true, digits: 2 }))))))) : null));
}

function scoresSection({ i }) {
  return section('Scores', data.payload.chance ? 'Where the head lies among all heads of the model; z counts standard deviations above what the head’s own spectrum would give by chance (hover says how).' : 'Where the head lies among all heads of the model.', scoreTable(i));
}

/** The sentence that the card opens with, made where its numbers were: strings, tokens and heads. */
function evidence(card) {
  return (card.evidence ?? []).map((part) => {
    if (typeof part === 'string') return part;
    return part.token === undefined ? headLink(part.head) : tokenChip(data.tokens[part.token]);
  });
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
        h('span.index', {}, String(k)), h('span.sigma.num', {}, format(d.value)),
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

/** Both ends of a direction by their first tokens, a line an end. */
function directionEnds(direction, count) {
  const first = (pairs) => h('span.side', {}, pairs.slice(0, count).map(([token]) => tokenChip(data.tokens[token])));
  return ['plus', 'minus'].map((end) => h('div.chips', {}, h('span.sign', {}, end === 'plus' ? '+' : MINUS),
    first(direction.reads[end]), h('span.soft', {}, '→'), first(direction.writes[end])));
}

/** What a head reads and writes, for a tooltip; nothing until the cards are read, which this sets off. */
function strongestEnds(i) {
  const direction = data.cardNow(i)?.directions?.[0];
  return direction ? h('div.tip-ends', {}, h('div.soft', {}, 'strongest direction, reads → writes'), directionEnds(direction, 3)) : null;
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
      h('td.num.soft', chance ? { title: `By chance ${formatIn(scale, chance.mean[i])}: ${chance.note}${isNumber(chance.spread?.[i]) ? `; ± ${format(chance.spread[i], { digits: 2 })} over seeds` : ''}` } : {}, isNumber(z) ? `z ${format(z, { sign: true, digits: 2 })}` : ''),
      h('td.place', {}, ticks(values, lo, hi, v)),
      h('td.num.soft', {}, rank ? (rank.equal ? 'all equal' : `${rank.rank} of ${rank.of}`) : '')));
  }
  return h('table.scores', {}, h('thead.visually-hidden', {}, h('tr', {}, ['Score', 'Value', 'Standard deviations above chance', 'Among all heads', 'Rank, largest first'].map((t) => h('th', { scope: 'col' }, t)))), h('tbody', {}, rows));
}
