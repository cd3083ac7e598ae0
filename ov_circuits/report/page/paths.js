/** The composition view: the strongest paths as a layered graph, and beside it the same paths as a list. */
function pathsView(focus) {
  const place = h('div', {}, h('p.loading', {}, 'Reading the paths in this file …'));
  const node = h('div.paths', {}, h('header', {}, h('h2', {}, 'Composition'), h('p.lead', {},
    'A path runs from an earlier head to a later one that reads what it writes: into its queries (Q), keys (K) or values (V). Its value is ', formula('‖W_A W_B‖ / (‖W_A‖ ‖W_B‖)'), '; z says how far the path stands out from all pairs of heads of its kind.')), place);
  let draw = () => {};
  data.composition().then((composition) => {
    const made = pathsParts(composition, focus);
    place.replaceChildren(made.node);
    draw = made.draw;
    update();
  });
  function update() {
    draw();
    updateTray();
  }
  return { node, title: focus === null ? 'Composition' : `Composition of head ${data.label(focus)}`, update, focus: 'h2' };
}

const PATHS_AT_FIRST = 40;
const PATHS_LISTED = 60;

function pathsParts(composition, focus) {
  const { paths } = composition;
  const strengths = paths.map((path) => path.paired);
  const [lowest, highest] = [Math.max(0, Math.floor(Math.min(...strengths))), Math.max(...strengths)];
  if (state.pathLeast === null) state.pathLeast = Math.min(highest, Math.floor(10 * strengths[Math.min(PATHS_AT_FIRST, strengths.length) - 1]) / 10);
  // A head's own paths are few: with one in focus all of them are there.
  const least = () => (focus === null ? state.pathLeast : -Infinity);
  const shown = () => paths.filter((path) => state.pathKinds.has(path.kind) && path.paired >= least() && (focus === null || path.from === focus || path.to === focus));

  const told = h('p.hint', { role: 'status' });
  const slider = h('input', {
    id: 'path-least', type: 'range', min: lowest, max: highest, step: 0.1, value: state.pathLeast,
    oninput: () => { state.pathLeast = Number(slider.value); draw(); },
  });
  const fdr = Math.max(...composition.kinds.map((kind) => composition.fdr[kind]).filter(isNumber));
  const kinds = h('fieldset.kinds', {}, h('legend', {}, 'Kinds'), composition.kinds.map((kind) => h('label', {},
    h('input', {
      type: 'checkbox', checked: state.pathKinds.has(kind),
      onchange: (event) => { state.pathKinds[event.target.checked ? 'add' : 'delete'](kind); draw(); },
    }), ' ', kindBadge(kind), h('span.soft', {}, ` ${KIND_NAMES[kind]}`), pathSample(kind))));
  const headChoice = h('select', { id: 'path-head', onchange: (event) => go(event.target.value === '' ? 'paths' : `paths/${data.label(Number(event.target.value))}`) },
    h('option', { value: '', selected: focus === null }, 'All heads'),
    Array.from({ length: data.count }, (_, i) => h('option', { value: i, selected: i === focus }, `Head ${data.label(i)}`)));
  const graph = h('div.scroll.graph', { tabindex: '0', role: 'group', 'aria-label': 'Graph of paths; the list holds the same' });
  const list = h('div');
  const controls = h('div.path-tools', {},
    h('div.field', {}, h('label', { for: 'path-head' }, 'Paths of'), headChoice), kinds,
    focus === null ? h('div.field', {}, h('label', { for: 'path-least' }, 'Stands out by at least z = ', h('output.num', { for: 'path-least' })), slider,
      Number.isFinite(fdr) ? h('button.quiet', { type: 'button', onclick: () => { slider.value = fdr; state.pathLeast = fdr; draw(); } }, `false discovery rate 5\u202f%: z ≥ ${format(fdr)}`) : null) : null);
  function draw() {
    const now = shown();
    const output = controls.querySelector('output');
    if (output) output.textContent = format(state.pathLeast);
    // Below its floor a kind's list holds every head's strongest alone.
    const short = focus === null ? composition.kinds.filter((kind) => state.pathKinds.has(kind) && state.pathLeast < composition.floor[kind]) : [];
    told.textContent = `${plural(now.length, 'path')} of ${wholeNumber(composition.pairs)} pairs of heads a kind.${
      focus !== null ? ' Of each kind the file holds a head’s five strongest in and out, and all that are among the strongest of the model.' : ''}${
      short.length ? ` Down here the file holds only each head’s five strongest ${short.join(', ')} paths in and out.` : ''}`;
    graph.replaceChildren(pathGraph(now, focus));
    list.replaceChildren(pathList(now, composition));
  }
  const notes = composition.notes.length ? h('p.hint', {}, composition.notes.join(' ')) : null;
  return {
    draw,
    node: h('div.paths-body', {}, controls, told,
      h('div.paths-columns', {}, h('section', { 'aria-label': 'Graph' }, graph, h('p.hint', {}, 'Layers run down, heads across; a line runs down from the head that writes to the head that reads, the stronger the thicker. Hover traces a head’s paths, click opens it.')),
        h('section', { 'aria-label': 'List of paths' }, list)),
      notes, h('p.hint', {}, h('span.source', {}, composition.source))),
  };
}

const pathSample = (kind) => s(`svg.path-sample`, { viewBox: '0 0 34 8', 'aria-hidden': 'true' }, s(`path.edge.edge-${kind}`, { d: 'M1 4H33' }));

function pathList(paths, composition) {
  if (!paths.length) return h('p.soft', {}, 'No path of these kinds stands out by so much.');
  return h('div', {}, h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Paths, strongest first' }, h('table.links.path-list', {},
    h('thead', {}, h('tr', {}, [['From'], ['To'], ['Input'], ['Value', 'num'], ['By chance', 'num'], ['z', 'num']].map(([t, c]) => h(c ? `th.${c}` : 'th', { scope: 'col' }, t)))),
    h('tbody', {}, paths.slice(0, PATHS_LISTED).map((path) => h(composition.flagged(path) ? 'tr.flagged' : 'tr', {},
      h('td', {}, headLink(path.from)), h('td', {}, headLink(path.to)), h('td', {}, kindBadge(path.kind)),
      h('td.num', {}, format(path.value)), h('td.num.soft', {}, format(path.chance)), h('td.num', {}, format(path.paired, { sign: true, digits: 2 }))))))),
  h('p.hint', {}, paths.length > PATHS_LISTED ? `The ${PATHS_LISTED} strongest. ` : '', 'By chance: the same singular values in random directions. ', h('b', {}, 'Bold'), ': flagged at a false discovery rate of 5\u202f%.'));
}

/** Heads on a grid of layers and heads, paths between them. The list beside it is the same for those who do not see it. */
function pathGraph(paths, focus) {
  const { meta, nHeads } = data;
  const [row, left, top] = [60, 34, 24];
  // As wide as its place, between what a head's name needs and what the eye can follow; many heads scroll.
  const room = main.clientWidth > 1020 ? 0.54 * main.clientWidth : main.clientWidth;
  const column = Math.min(110, Math.max(38, (room - left) / nHeads));
  // Layers without a path are drawn close together.
  const used = new Set(paths.flatMap((path) => [data.layerOf(path.from), data.layerOf(path.to)]));
  const tall = Array.from({ length: meta.n_layers }, (_, l) => (used.has(l) ? row : 15));
  const middle = tall.map((size, l) => top + tall.slice(0, l).reduce((a, b) => a + b, 0) + size / 2);
  const [width, height] = [left + nHeads * column, top + tall.reduce((a, b) => a + b, 0)];
  const x = (i) => left + (data.headOf(i) + 0.5) * column;
  const y = (i) => middle[data.layerOf(i)];
  const touched = new Map();
  const edges = [];
  const strongest = Math.max(...paths.map((path) => path.paired), 1e-12);
  paths.forEach((path, k) => {
    for (const i of [path.from, path.to]) touched.set(i, [...(touched.get(i) ?? []), k]);
    // Kinds leave side by side; a path within one column bows out, so that it does not run through the heads between.
    const shift = { Q: -7, K: 0, V: 7 }[path.kind];
    const [x1, y1, x2, y2] = [x(path.from) + shift, y(path.from) + 8, x(path.to) + shift, y(path.to) - 8];
    const bend = Math.abs(x2 - x1) < column / 2 && y2 - y1 > row ? 0.45 * column : 0;
    const d = `M${x1} ${y1}C${x1 + bend} ${y1 + 0.55 * (y2 - y1)} ${x2 + bend} ${y2 - 0.55 * (y2 - y1)} ${x2} ${y2}`;
    edges.push(s('g.path', { data: { path: k } },
      s('path.edge-target', { d }), s(`path.edge.edge-${path.kind}`, { d, style: { 'stroke-width': (1 + 2.5 * (path.paired / strongest) ** 2).toFixed(2) } })));
  });
  const nodes = [];
  for (let i = 0; i < data.count; i++) {
    nodes.push(touched.has(i)
      ? s(i === focus ? 'g.node.focused' : 'g.node', { data: { head: i } },
        s('rect', { x: x(i) - 16, y: y(i) - 8, width: 32, height: 16, rx: 4 }), s('text', { x: x(i), y: y(i) + 3.5 }, data.label(i)))
      : s('circle.dot', { cx: x(i), cy: y(i), r: 1.6 }));
  }
  const names = [
    ...Array.from({ length: meta.n_layers }, (_, l) => s('text.axis', { x: left - 12, y: middle[l] + 3.5 }, String(l))),
    ...Array.from({ length: nHeads }, (_, k) => s('text.axis.across', { x: left + (k + 0.5) * column, y: 12 }, String(k))),
  ];
  const svg = s('svg.path-graph', { viewBox: `0 0 ${width} ${height}`, width, height, 'aria-hidden': 'true' }, names, edges, nodes);
  const light = (chosen) => {
    svg.classList.toggle('tracing', chosen !== null);
    edges.forEach((edge, k) => edge.classList.toggle('lit', chosen?.has(k) ?? false));
  };
  svg.addEventListener('pointermove', (event) => {
    const [edge, head] = [event.target.closest('[data-path]'), event.target.closest('[data-head]')];
    if (edge) {
      const path = paths[edge.dataset.path];
      light(new Set([Number(edge.dataset.path)]));
      showTooltip([h('div', {}, h('strong', {}, `${data.label(path.from)} → ${data.label(path.to)}`), ` ${path.kind}-composition `, h('b.num', {}, format(path.value))),
        h('div.soft', {}, `by chance ${format(path.chance)}; z ${format(path.paired, { sign: true, digits: 2 })} among all pairs of the kind`)], event.clientX, event.clientY);
    } else if (head) {
      const i = Number(head.dataset.head);
      light(new Set(touched.get(i)));
      const [from, to] = ['to', 'from'].map((own) => paths.filter((path) => path[own] === i).length);
      showTooltip([h('strong', {}, `Head ${data.label(i)}`), h('div.soft', {}, `${from} in, ${to} out, of the paths shown`), strongestEnds(i)], event.clientX, event.clientY);
    } else {
      light(null);
      hideTooltip();
    }
  });
  svg.addEventListener('pointerleave', () => { light(null); hideTooltip(); });
  svg.addEventListener('click', (event) => {
    const head = event.target.closest('[data-head]');
    if (head) go(data.label(Number(head.dataset.head)));
  });
  return svg;
}
