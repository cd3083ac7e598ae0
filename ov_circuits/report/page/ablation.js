/** Ablation beside attribution: what each head adds itself, and what the answer loses without it. */
function ablationPart() {
  const ablation = data.prompt.ablation;
  const rows = ablation.head.map((head, k) => ({
    head, direct: ablation.direct_effect[k], total: ablation.total_effect[k], loss: ablation.answer_loss_change[k], kl: ablation.kl[k],
  }));
  const made = chart({
    height: 380, label: 'Direct effect across, total effect up, one point a head',
    tell: (p) => {
      const row = rows[p.customdata];
      return row && [h('strong', {}, `Head ${data.label(row.head)}`), h('div', {}, 'direct ', h('b.num', {}, format(row.direct, { sign: true }))),
        h('div', {}, 'total ', h('b.num', {}, format(row.total, { sign: true }))), h('div.soft', {}, answered(row))];
    },
    open: (p) => { if (rows[p.customdata]) go(data.label(rows[p.customdata].head)); },
  });
  function draw() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    const layers = makeScale(-0.25 * data.meta.n_layers, data.meta.n_layers, false);
    const all = rows.flatMap((row) => [row.direct, row.total]);
    const [low, high] = [Math.min(0, ...all), Math.max(0, ...all)];
    const pad = 0.06 * (high - low || 1);
    const range = [low - pad, high + pad];
    const named = new Set([...rows].sort((a, b) => Math.abs(b.total) + Math.abs(b.direct) - Math.abs(a.total) - Math.abs(a.direct)).slice(0, 6));
    return made.draw([
      { type: 'scatter', mode: 'lines', x: range, y: range, hoverinfo: 'skip', line: { width: 1, dash: 'dash', color: get('--soft') } },
      {
        type: 'scatter', mode: 'markers+text', x: rows.map((row) => row.direct), y: rows.map((row) => row.total), customdata: rows.map((_, k) => k),
        text: rows.map((row) => (named.has(row) ? data.label(row.head) : '')), textposition: 'top center', textfont: { size: 11, color: get('--ink') },
        hoverinfo: 'none', cliponaxis: false,
        marker: { size: rows.length > 200 ? 7 : 9, color: rows.map((row) => layers.at(data.layerOf(row.head)).css), line: { width: 0.75, color: get('--mark-line') } },
      },
    ], { x: { title: 'direct effect: its own entry in the account', range }, y: { title: 'total effect: lost without it', range } });
  }
  const some = rows.length < data.count ? ` The ${rows.length} heads of largest attribution were ablated.` : '';
  const node = h('section', {}, h('h3', {}, 'Ablation beside attribution'),
    h('p.lead', {}, `Each head alone is set to zero and the model runs on.${some} On the dashed line its removal costs what its own entry says. Nearer to zero than the line, later parts make up for its absence (self-repair); farther out, they build on it.`),
    h('div.ablation', {}, h('figure', {}, made.node, h('p.hint', {}, 'Coloured by layer, the last ones strongest. Click opens a head.')), ablationTable(rows)));
  return { node, draw };
}

function answered({ direct, total }) {
  const rest = total - direct;
  const way = rest * direct < 0 ? 'later parts make up for' : 'later parts add';
  return `${way} ${format(Math.abs(rest), { digits: 2 })}`;
}

const ABLATED_ROWS = 12;

function ablationTable(rows) {
  const columns = [
    ['direct', 'Direct', 'What the head adds to the answer by itself, value bias included'], ['total', 'Total', 'What the answer loses when the head is set to zero'],
    ['rest', `Total ${MINUS} direct`, 'What later parts make of its absence'], ['loss', 'Loss', 'Rise of the answer’s cross-entropy, nats'],
  ];
  const full = rows.map((row) => ({ ...row, rest: row.total - row.direct }));
  const scales = new Map(columns.map(([key]) => [key, scaleOf(full.map((row) => row[key]), true)]));
  let sort = { key: 'total', descending: true };
  let all = false;
  const place = h('div');
  function draw() {
    const size = (row) => (sort.key === 'head' ? -row.head : Math.abs(row[sort.key]));
    const order = [...full].sort((a, b) => (sort.descending ? size(b) - size(a) : size(a) - size(b)) || a.head - b.head);
    const header = (key, label, title) => h(key === 'head' ? 'th' : 'th.num', { scope: 'col', 'aria-sort': sort.key === key ? (sort.descending ? 'descending' : 'ascending') : null },
      h('button.sort', { type: 'button', title, onclick: () => { sort = { key, descending: sort.key === key ? !sort.descending : true }; draw(); place.querySelector('th[aria-sort] button').focus(); } },
        label, h('span.sort-mark', { 'aria-hidden': 'true' }, sort.key === key ? (sort.descending ? '↓' : '↑') : '')));
    place.replaceChildren(
      h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Effects of heads' }, h('table.effects', {},
        h('caption.visually-hidden', {}, 'Effects of heads, sorted by size'),
        h('thead', {}, h('tr', {}, header('head', 'Head', 'Layer and head'), columns.map(([key, label, title]) => header(key, label, title)))),
        h('tbody', {}, (all ? order : order.slice(0, ABLATED_ROWS)).map((row) => h('tr', {}, h('th', { scope: 'row' }, headLink(row.head)),
          columns.map(([key]) => h('td.num', {}, formatIn(scales.get(key), row[key])))))))),
      full.length > ABLATED_ROWS ? h('button.quiet', { type: 'button', onclick: () => { all = !all; draw(); } }, all ? `Show the first ${ABLATED_ROWS}` : `Show all ${full.length} heads`) : '');
  }
  draw();
  return place;
}

const RECEIVING_HEADS = 18;

/** What a destination token receives: its source tokens' writes, head by head. */
function receivedPart() {
  const { prompt } = data;
  const n = prompt.tokens.length;
  const place = h('div');
  const strip = h('div');
  let chosen = prompt.position;
  async function choose(position) {
    chosen = position;
    const focused = strip.contains(document.activeElement);
    strip.replaceChildren(h('div.strip', {}, tokenStrip(prompt.tokens, null, {
      answerAt: n - 1, mark: prompt.position, label: 'Destination token', choose, chosen,
    })));
    if (focused) strip.querySelector('[aria-pressed="true"]')?.focus();
    const rows = [];
    for (let i = 0; i < data.count; i++) {
      const weighted = await arrayRow(prompt.value_weighted, i);
      const row = [...weighted.slice(position * n, position * n + position + 1)];
      rows.push({ head: i, row, sum: row.reduce((a, b) => a + b, 0) });
    }
    if (position !== chosen) return;
    const top = rows.sort((a, b) => b.sum - a.sum || a.head - b.head).slice(0, RECEIVING_HEADS);
    place.replaceChildren(receivedTable(prompt.tokens.slice(0, position + 1), top));
  }
  const node = h('section', {}, h('h3', {}, 'What a token receives'),
    h('p.lead', {}, 'Choose a destination token. Each cell is the size of what a head moves to it from a source token, ', formula('A · ‖v W_O‖'), '; the heads that move most come first.'),
    strip, place);
  return { node, draw: () => choose(chosen) };
}

function receivedTable(tokens, rows) {
  const scale = makeScale(0, Math.max(1e-12, ...rows.flatMap(({ row }) => row)), false);
  const table = h('table.received', {}, h('caption.visually-hidden', {}, 'Size of what heads move, sources across'),
    h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, h('span.visually-hidden', {}, 'Head')), tokens.map((token) => h('th.token-column', { scope: 'col' }, h('div', {}, tokenChip(token)))))),
    h('tbody', {}, rows.map(({ head, row }) => h('tr', {}, h('th', { scope: 'row' }, headLink(head)), row.map((value, source) => h('td', {
      data: { key: `${head} ${source}` }, style: { background: scale.at(value).css },
    }, h('span.visually-hidden', {}, format(value, { digits: 2 }))))))));
  const byHead = new Map(rows.map(({ head, row }) => [head, row]));
  tellOnHover(table, (key) => {
    const [head, source] = key.split(' ').map(Number);
    return [h('div', {}, h('strong', {}, data.label(head)), h('span.soft', {}, ' moves from '), tokenChip(tokens[source]), h('span.soft', {}, ` ${source}`)),
      h('div', {}, 'size ', h('b.num', {}, format(byHead.get(head)[source])))];
  });
  return h('div', {}, h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'What a token receives, by head and source' }, table),
    h('div.heat-scale', {}, legend(scale, [], { label: 'Colours of sizes' })));
}
