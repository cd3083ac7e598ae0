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
    tell: (p) => [h('div', {}, `singular value ${p.x} `, h('b.num', {}, format(values[p.x]))),
      h('div.soft', {}, `${percent((values[p.x] ** 2) / total)} of the squared norm${flagged.has(p.x) ? '; not separable from the next' : ''}`),
      card.null_low?.length ? h('div.soft', {}, `by chance ${format(card.null_low[p.x])} to ${format(card.null_high[p.x])}`) : null],
  });
  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const [accent, soft] = ['--accent', '--bar'].map((name) => style.getPropertyValue(name).trim());
    const read = card.directions?.length ?? 0;
    const index = values.map((_, k) => k);
    const edge = { type: 'scatter', mode: 'lines', x: index, hoverinfo: 'skip', line: { width: 1, color: style.getPropertyValue('--soft').trim() } };
    const band = card.null_low?.length ? [
      { ...edge, y: card.null_low }, { ...edge, y: card.null_high, fill: 'tonexty', fillcolor: style.getPropertyValue('--band').trim() }] : [];
    return made.draw([{
      type: 'bar', x: index, y: values, hoverinfo: 'none',
      marker: { color: values.map((_, k) => (k < read ? accent : soft)), line: { width: 0 } },
    }, ...band], {
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

/** All heads by their spaces; the open one is ringed, layers run from light to dark. */
function spaceChart(places, current, label) {
  const made = chart({
    height: 280, label, tell: (p) => [h('strong', {}, `Head ${data.label(p.customdata)}`), data.grouped ? h('span.soft', {}, ` · key/value head ${data.groupOf(p.customdata)}`) : null, strongestEnds(p.customdata)],
    open: (p) => go(data.label(p.customdata)),
  });
  const known = places.map(([x], i) => (isNumber(x) ? i : null)).filter((i) => i !== null);
  const draw = () => {
    const layers = makeScale(-0.25 * data.meta.n_layers, data.meta.n_layers, false);
    const style = getComputedStyle(document.documentElement);
    const points = (heads, marker) => ({
      type: 'scatter', mode: 'markers', x: heads.map((i) => places[i][0]), y: heads.map((i) => places[i][1]), customdata: heads, hoverinfo: 'none', cliponaxis: false, marker,
    });
    const colour = (heads) => heads.map((i) => layers.at(data.layerOf(i)).css);
    const line = style.getPropertyValue('--mark-line').trim();
    return made.draw([
      points(known, { size: known.length > 400 ? 6 : 8, color: colour(known), line: { width: 0.5, color: line } }),
      points(known.filter((i) => i === current), { size: 15, color: colour([current]), line: { width: 3, color: style.getPropertyValue('--bad').trim() } }),
    ], { x: { title: 'first component', showticklabels: false }, y: { title: 'second component', showticklabels: false } });
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
