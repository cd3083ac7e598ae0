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
  async function draw() {
    const { sources, parts } = await promptOfHead(i);
    strip.replaceChildren(stripWithLegend(sources, sources
      ? `Prompt, coloured by the attribution that flows through head ${data.label(i)}` : 'Prompt'));
    place.replaceChildren(parts);
  }
  return { strip, section: h('section', {}, h('h3', {}, 'On the prompt'), place), draw };
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

/** The attention patterns of a layer's heads, small and side by side; one of them is chosen. */
async function layerPatterns(current, choose) {
  const { prompt } = data;
  const first = data.layerOf(current) * data.nHeads;
  const heads = Array.from({ length: data.nHeads }, (_, k) => first + k);
  const patterns = await Promise.all(heads.map((i) => arrayRow(prompt.pattern, i)));
  const scale = makeScale(0, 1, false);
  return h('div.patterns', { role: 'group', 'aria-label': `Attention of the heads of layer ${data.layerOf(current)}` }, heads.map((i, k) => h('button.pattern', {
    type: 'button', 'aria-pressed': String(i === current), data: { key: i }, onclick: () => choose(i),
  }, square(prompt.tokens.length, patterns[k], { scale, label: '', side: 68 }), h('span', {}, h('span.visually-hidden', {}, 'Head '), data.label(i)))));
}

const nameOf = (component) => data.prompt.component_names?.[component] ?? component;
const IN_LAYER = { head: 'heads', value_bias: 'value biases', b_O: 'output bias', mlp: 'MLP', post_norm: 'post-norm' };

/** Rows of the account: summed by kind, or as the stream runs. */
function accountRows(components, by) {
  if (by === 'layer') {
    return components.map((c) => ({
      name: c.layer === null || c.layer === undefined ? nameOf(c.component) : `Layer ${c.layer} ${IN_LAYER[c.component] ?? c.component}`,
      value: c.value, layer: c.component === 'head' ? c.layer : null,
    }));
  }
  const kinds = new Map();
  for (const c of components) kinds.set(c.component, (kinds.get(c.component) ?? 0) + c.value);
  return [...kinds].map(([kind, value]) => ({ name: nameOf(kind), value, layer: null }));
}

function strongestOf(layer) {
  const values = data.prompt.head_value;
  let best = layer * data.nHeads;
  if (!values) return best;
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
  const strip = h('div.prompt-strip');
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
  const headChoice = h('select', { id: 'prompt-head', onchange: (event) => chooseHead(Number(event.target.value)) },
    Array.from({ length: data.count }, (_, i) => h('option', { value: i, selected: i === state.promptHead }, data.label(i))));
  const layerChoice = h('select', { id: 'prompt-layer', onchange: (event) => chooseHead(strongestOf(Number(event.target.value))) },
    Array.from({ length: data.meta.n_layers }, (_, layer) => h('option', { value: layer }, String(layer))));
  function chooseHead(i) {
    state.promptHead = i;
    drawHead();
  }
  const layerPlace = h('div');
  async function drawHead() {
    const i = state.promptHead;
    headChoice.value = String(i);
    layerChoice.value = String(data.layerOf(i));
    const [{ parts }, patterns] = await Promise.all([promptOfHead(i), prompt.pattern ? layerPatterns(i, chooseHead) : null]);
    if (i !== state.promptHead) return;
    const focused = layerPlace.contains(document.activeElement);
    layerPlace.replaceChildren(patterns ?? '');
    if (focused) layerPlace.querySelector('[aria-pressed="true"]').focus();
    chosen.replaceChildren(parts, h('p', {}, headLink(i, { text: `All of head ${data.label(i)} ›`, className: 'plain-link' })));
  }
  const ranking = (title, list) => list.length ? h('div', {}, h('h4', {}, title, state.promptSource === null ? null : [' from ', tokenChip(prompt.tokens[state.promptSource])]), h('ol.ranking', {}, list.map(([v, i]) =>
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
    rankings.replaceChildren(...[ranking('Heads most for it', mostFor(1)), ranking('Heads most against it', mostFor(-1))].filter(Boolean));
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
  const ablation = prompt.ablation ? ablationPart() : null;
  const received = prompt.value_weighted ? receivedPart() : null;
  const node = h('div.prompt', {},
    h('header', {}, h('h2', {}, 'The prompt'), question(prompt),
      h('p.facts', {}, `${prompt.tokens.length} tokens. `, prompt.bos_added ? 'A beginning-of-text token was put in front of the prompt; it is part of every number here.' : 'No token was added to the prompt.')),
    strip,
    explained ? h('div.prompt-columns', {},
      h('section', {}, h('h3', {}, 'The account'), h('p.lead', {}, ['Every part of the model that adds to the ', quantity(), ', through the final norm at its actual scale. This is the direct effect: what later layers would make up for is not in it.']), toggle, account, rankings),
      map ? h('section', {}, h('h3', {}, 'Heads'), mapLead, map.node, legendPlace) : null) : null,
    ablation?.node,
    h('section', {}, h('h3', {}, 'One head on this prompt'), h('div.prompt-choice', {}, h('div.field', {}, h('label', { for: 'prompt-layer' }, 'Layer'), layerChoice), h('div.field', {}, h('label', { for: 'prompt-head' }, 'Head'), headChoice)),
      layerPlace, chosen), received?.node);
  function update() {
    drawMap();
    if (explained) drawAccount();
    drawStrip();
    drawHead();
    ablation?.draw();
    received?.draw();
    updateTray();
  }
  return { node, title: 'Prompt', update, focus: 'h2' };
}
