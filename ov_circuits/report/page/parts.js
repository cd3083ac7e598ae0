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
  grid.addEventListener('focusin', (event) => {
    cells[active].tabIndex = -1;
    active = Number(event.target.closest('.cell').dataset.key);
    cells[active].tabIndex = 0;
  });
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
    if (to !== undefined) { cells[to].focus(); event.preventDefault(); }
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
    h('div.legend-ends', {}, ends.map((v) => h('span', {}, roundEnd(scale, v)))));
}

/** A number at the end of a scale, without the zeros that a column would want. */
const roundEnd = (scale, v) => formatIn(scale, v).replace(/(\.\d*?)0+$/, '$1').replace(/\.$/, '');

/** A rug of all values as one path; `mark` is drawn over it. */
function ticks(values, lo, hi, mark = null) {
  const at = (v) => Math.min(200, Math.max(0, ((v - lo) / (hi - lo || 1)) * 200)).toFixed(1);
  const path = values.filter(isNumber).map((v) => `M${at(v)} 1V9`).join('');
  return s('svg.ticks', { viewBox: '0 0 200 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
    s('path.rug', { d: path, style: { 'stroke-opacity': Math.min(0.9, Math.max(0.18, 16 / values.length)) } }),
    lo < 0 && hi > 0 ? s('path.zero', { d: `M${at(0)} 0V10` }) : null,
    isNumber(mark) ? s('path.here', { d: `M${at(mark)} 0V10` }) : null);
}

/** The choice of a score, grouped; an axis may also be the layer. */
function scoreSelect(id, value, choose, { layer = false } = {}) {
  const groups = new Map();
  for (const score of data.scores) {
    const name = score.group ?? 'Scores';
    if (!groups.has(name)) groups.set(name, []);
    groups.get(name).push(score);
  }
  return h('select', { id, onchange: (event) => choose(event.target.value) },
    layer ? h('option', { value: LAYER, selected: value === LAYER }, data.byKey.get(LAYER).label) : null,
    [...groups].map(([name, scores]) => h('optgroup', { label: name },
      scores.map((score) => h('option', { value: score.key, selected: score.key === value }, score.label)))));
}

/** Tokens as running text, each on the colour of its value. */
function tokenStrip(tokens, values, { scale = null, answerAt = null, mark = answerAt, label, choose = null, chosen = null, from = 0 }) {
  const strip = h('ol.token-strip', { 'aria-label': label });
  tokens.forEach((token, position) => {
    const value = values ? values[position] : null;
    const tint = values && isNumber(value) ? scale.at(value) : null;
    const told = values ? `${tokenText(token)}, position ${position}: ${format(value, { sign: true })}` : `${tokenText(token)}, position ${position}`;
    const content = [tokenChip(token, { tint, title: '' }), h('span.visually-hidden', {}, ` ${told}`)];
    strip.append(h(position === mark ? 'li.explained' : 'li', { data: { key: position } }, choose && position >= from && position <= answerAt
      ? h('button.token-button', { type: 'button', 'aria-pressed': String(position === chosen), onclick: () => choose(position) }, content) : content));
    if (token.includes('\n')) strip.append(h('li.break', { 'aria-hidden': 'true' }));
  });
  return tellOnHover(strip, (k) => [
    h('strong', {}, tokenChip(tokens[k])), h('span.soft', {}, ` position ${k}`),
    values ? h('div', {}, 'from this token ', h('b.num', {}, format(values[k], { sign: true }))) : null,
    Number(k) === mark ? h('div.soft', {}, 'the next token after this one is explained') : null,
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
  const marks = [...new Set([top, 0, bottom])].filter((v) => v === 0 || Math.abs(v) > 0.12 * span).map((v) => [v, roundEnd(scale, v)]);
  // As wide as its longest number: what does not fit is lost at the left, the sign first.
  const longest = Math.max(...marks.map(([, text]) => text.length));
  const axis = h('div.bar-axis', { 'aria-hidden': 'true', style: { '--longest': longest } },
    marks.map(([v, text]) => h('span.num', { style: { top: `${((top - v) / span) * 110}px` } }, text)));
  const chart = h('div.token-bars', { role: 'img', 'aria-label': label, style: { '--zero': `${(top / span) * 100}%` } }, axis, columns);
  return h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': label }, tellOnHover(chart, (k) => [
    h('strong', {}, tokenChip(tokens[k])), h('span.soft', {}, ` position ${k}`), h('div', {}, `${say} `, h('b.num', {}, format(values[k], { sign: diverging }))),
  ]));
}

/** A square of destination rows and source columns, drawn on a canvas so that long prompts stay light; `side` is in pixels. */
function square(n, matrix, { scale, label, side }) {
  // Without a label it is beside words that say the same.
  const told = label ? { role: 'img', 'aria-label': label } : { 'aria-hidden': 'true' };
  const canvas = h('canvas', { width: n, height: n, ...told, style: { width: `${side}px`, height: `${side}px` } });
  const context = canvas.getContext('2d');
  const image = context.createImageData(n, n);
  for (let t = 0; t < n; t++) {
    for (let source = 0; source <= t; source++) {
      const [r, g, b] = scale.at(matrix[t * n + source]).bytes;
      image.data.set([r, g, b, 255], 4 * (t * n + source));
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** The square with its tokens, and a tooltip for each cell. */
function heatmap(tokens, matrix, { scale, label, say }) {
  const n = tokens.length;
  const size = n <= 14 ? 26 : n <= 24 ? 20 : n <= 40 ? 14 : n <= 80 ? 10 : Math.max(2, Math.floor(640 / n));
  const every = Math.ceil(12 / size);
  const canvas = square(n, matrix, { scale, label, side: n * size });
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
  return h('div', {},
    h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': label },
      h('div.heat', {}, labels('heat-rows'), plane, h('div.heat-corner'), labels('heat-columns'))),
    h('div.heat-scale', {}, h('span', {}, 'rows: the token that looks; columns: what it looks at'), legend(scale, [], { label: `Colours of ${say}` })));
}
