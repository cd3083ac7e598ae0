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
    [...new Set([state.x, state.y, state.score])].filter((key) => key !== LAYER).map((key) => h('div', {}, `${data.byKey.get(key).label} `, h('b.num', {}, format(data.value(key, i))))),
    strongestEnds(i),
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
          h('div.field', {}, h('label', { for: 'score-x' }, 'Across'), scoreSelect('score-x', state.x, choose('x'), { layer: true })),
          h('div.field', {}, h('label', { for: 'score-y' }, 'Up'), scoreSelect('score-y', state.y, choose('y'), { layer: true }))),
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
    about.replaceChildren(h('p', {}, withFormulas(score.note ?? ''), ' ', h('span.source', {}, score.source ?? '')));
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
  // Without embeddings there are no directions in tokens, and nothing to search.
  const readable = data.tokens.length > 0;
  const message = h('p.message', { id: 'filter-message', role: 'status' });
  const filter = h('input', {
    id: 'filter', type: 'text', autocomplete: 'off', spellcheck: 'false', value: state.filterText,
    placeholder: `${state.score} > 0.5 and layer > ${Math.floor(data.meta.n_layers / 2)}`, 'aria-describedby': 'filter-message',
    oninput: () => { setFilter(filter.value); state.refreshAtlas(); },
  });
  const names = h('details.names', {}, h('summary', {}, 'Names for the filter'),
    h('p', {}, 'Comparisons ', h('code', {}, '<  <=  >  >=  ==  !='), ', joined by ', h('code', {}, 'and'), ', ', h('code', {}, 'or'), ', ', h('code', {}, 'not'),
      ' and parentheses; ', h('code', {}, 'abs( )'), '. A part of a name will do; of several scores that have it, the first is taken. ', h('code', {}, '_z'), ' after a name asks for its distance from chance, in standard deviations.'),
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
    const [cards, search] = await Promise.all([data.cards(), data.search()]);
    if (mine !== latest) return;
    state.hits = searchTokens(cards, search, state.reads, state.writes);
    state.refreshAtlas();
  }

  function update() {
    message.textContent = state.filterError ? `This filter does not read: ${state.filterError}.` : state.filterNotes.join(' ');
    message.classList.toggle('soft', !state.filterError);
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
      readable ? h('fieldset.search', {}, h('legend.visually-hidden', {}, 'Which heads read or write a token'),
        tokenInput('reads', 'Reads token'), h('span.arrow', { 'aria-hidden': 'true' }, '→'), tokenInput('writes', 'Writes token')) : null),
    message,
    readable ? h('p.hint', {}, 'Tokens are searched in the singular directions of each head and in its strongest pairs. With both boxes filled, a head must read the one and write the other at the same end of a direction, or in one pair. ',
      'A space counts; quotes ask for the whole token: ', h('code', {}, '" Paris"'), '.') : null,
    names, results, left);
  return { node, update };
}

function setFilter(text) {
  state.filterText = text;
  Object.assign(state, { filterError: null, filterNotes: [] });
  try {
    state.filter = parseFilter(text, resolveName);
  } catch (error) {
    if (!(error instanceof FilterError)) throw error;
    state.filter = null;
    state.filterError = error.message;
  }
}

/** Places in a table of the tokens that a query means. */
function matchTokens(table, query) {
  const quoted = /^"(.*)"$/su.exec(query);
  const wanted = (quoted ? quoted[1] : query).replace(/·/g, ' ');
  const lower = wanted.toLowerCase();
  const found = new Set();
  table.forEach((token, k) => {
    if (quoted ? token === wanted : token.toLowerCase().includes(lower)) found.add(k);
  });
  return found;
}

/** Pairs, and ends of directions, that read a token like `reads` and write one like `writes`. Of an end the file knows more tokens
 * than a card shows, in order: the sooner they come the stronger the hit. */
function searchTokens(cards, search, reads, writes) {
  const wantedIn = (table) => [reads, writes].map((query) => (query ? matchTokens(table, query) : null));
  const table = search?.tokens ?? data.tokens;
  const [wantRead, wantWrite] = wantedIn(table);
  const [pairRead, pairWrite] = wantedIn(data.tokens);
  const tokensOf = (i, k, side, end) => search?.places[i][k][side][end] ?? cards[i].directions[k][side][end].map(([token]) => token);
  const first = (tokens, wanted) => (wanted ? tokens.findIndex((token) => wanted.has(token)) : 0);
  const heads = new Set();
  const [pairs, found] = [[], []];
  cards.forEach((card, i) => {
    (card.directions ?? []).forEach(({ energy }, k) => {
      for (const end of ['plus', 'minus']) {
        const [readable, writable] = [tokensOf(i, k, 'reads', end), tokensOf(i, k, 'writes', end)];
        const [read, write] = [first(readable, wantRead), first(writable, wantWrite)];
        if (read < 0 || write < 0) continue;
        heads.add(i);
        found.push({
          head: i, direction: k, end, energy, place: Math.max(read, write),
          read: wantRead ? table[readable[read]] : null, write: wantWrite ? table[writable[write]] : null,
        });
      }
    });
    // A pair is told whole, and only where it raises: what is lowered is not written.
    for (const [source, output, value] of card.pairs?.positive ?? []) {
      if ((pairRead && !pairRead.has(source)) || (pairWrite && !pairWrite.has(output))) continue;
      heads.add(i);
      pairs.push({ head: i, value, read: data.tokens[source], write: data.tokens[output] });
    }
  });
  found.sort((a, b) => a.place - b.place || b.energy - a.energy);
  pairs.sort((a, b) => b.value - a.value);
  const entries = askedFor(reads, writes);
  for (const { head } of entries) heads.add(head);
  return { found: [...entries, ...pairs, ...found], heads };
}

// Among so many most raised tokens a head is said to write one.
const MOST_RAISED = 100;

/** Of pairs that the file was made with (`--token-pair`), the heads that write the output where they see the source; else the nearest to it. */
function askedFor(reads, writes) {
  const means = (token, query) => !query || matchTokens([token], query).size > 0;
  return data.scores.filter(({ pair }) => pair && means(pair[0], reads) && means(pair[1], writes)).flatMap(({ key, pair: [read, write] }) => {
    const entries = Array.from({ length: data.count }, (_, head) => ({ head, read, write, value: data.value(key, head), rank: data.value(`${key}_rank`, head) }))
      .filter(({ value }) => value > 0).sort((a, b) => a.rank - b.rank || b.value - a.value);
    return entries.filter(({ rank }, k) => rank <= MOST_RAISED || k === 0);
  });
}

function searchResults({ found: all }) {
  const LIMIT = 24;
  const found = all.filter((hit) => isShown(hit.head));
  const heads = new Set(found.map((hit) => hit.head));
  if (all.length && !found.length) return h('p.soft', {}, 'Heads that read or write such a token are there, but the filter or the box on the scatter leaves none of them.');
  if (!found.length) {
    return h('p.soft', {}, 'No direction or pair in this file reads or writes such a token: it holds the strongest tokens of each. ',
      'Of two tokens that you name, ', h('code', {}, 'report --token-pair " France" " Paris"'), ' puts every head’s exact entry on the map.');
  }
  return h('div', {},
    h('p.soft', {}, `${plural(found.length, 'place')} in ${plural(heads.size, 'head')}${found.length > LIMIT ? `; the first ${LIMIT}` : ''}: pairs, then directions, the strongest first`),
    h('ul.hits', {}, found.slice(0, LIMIT).map((hit) => h('li', {}, headLink(hit.head),
      hit.read !== null ? [' reads ', tokenChip(hit.read)] : null,
      hit.read !== null && hit.write !== null ? ' and' : null,
      hit.write !== null ? [' writes ', tokenChip(hit.write)] : null,
      hit.rank !== undefined ? h('span.soft.nowrap', { title: 'Its entry of the full OV circuit above the mean of its row, and the place in that row' }, ` entry ${format(hit.value, { sign: true })}, rank ${wholeNumber(hit.rank)}`)
        : hit.direction === undefined ? h('span.soft.nowrap', { title: 'Strongest token pair: its entry of the full OV circuit' }, ` pair, ${format(hit.value, { sign: true })}`)
        : h('span.soft.nowrap', { title: 'Index of the direction, its end, its share of the squared norm of OV, and the place of the token at that end' },
          ` ${hit.direction}${hit.end === 'plus' ? '+' : MINUS}, ${percent(hit.energy)}, place ${hit.place + 1}`)))));
}

/** Heads as rows. Columns are the scores in view unless all are asked for. */
function headTable() {
  const place = h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Table of heads' });
  const foot = h('div.table-foot');
  const ROWS = 40;
  // The first direction's tokens stand beside the scores: in a column that is filled when the map has been painted.
  const cards = data.tokens.length ? painted().then(data.cards) : null;
  const COLUMNS = !cards ? 7 : matchMedia('(max-width: 640px)').matches ? 2 : 4;
  const endsCell = (i) => {
    const cell = h('td.ends');
    cards.then((all) => { if (all[i].directions?.length) cell.append(...directionEnds(all[i].directions[0], 3)); });
    return cell;
  };
  function update() {
    const inView = [...new Set([state.score, state.x, state.y])].filter((key) => key !== LAYER);
    const keys = state.allColumns ? data.scores.map((score) => score.key) : [...inView, ...data.scores.map((score) => score.key).filter((key) => !inView.includes(key))].slice(0, COLUMNS);
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
        keys.map((key) => sortHeader(key, data.byKey.get(key).label, data.byKey.get(key).note)),
        cards ? h('th.ends', { scope: 'col' }, 'Its strongest direction reads → writes, at both ends') : null)),
      h('tbody', {}, shown.map((i) => h('tr', {},
        h('td.mark-column', {}, h('input', {
          type: 'checkbox', checked: state.compare.has(i), 'aria-label': `Compare head ${data.label(i)}`, onchange: () => toggleCompare(i),
        })),
        h('th', { scope: 'row' }, headLink(i)),
        keys.map((key) => {
          const v = data.value(key, i);
          return h('td.num', {}, isNumber(v) ? h('span.swatch', { style: { background: data.scale(key).at(v).css } }) : null,
            formatIn(data.scale(key), v));
        }), cards ? endsCell(i) : null)))));
    foot.replaceChildren(
      order.length > ROWS ? h('button.quiet', { type: 'button', onclick: () => { state.allRows = !state.allRows; update(); } },
        state.allRows ? `Show the first ${ROWS} rows` : `Show all ${order.length} rows`) : '',
      data.scores.length > COLUMNS ? h('button.quiet', { type: 'button', onclick: () => { state.allColumns = !state.allColumns; update(); } },
        state.allColumns ? 'Show fewer scores' : `Show all ${data.scores.length} scores`) : '');
  }
  return { node: h('div', {}, place, foot), update };
}
