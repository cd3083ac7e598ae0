function compareView(heads) {
  const place = h('div', {}, h('p.loading', {}, 'Reading the cards in this file …'));
  const node = h('div.compare', {}, h('nav.card-nav', { 'aria-label': 'Heads' }, h('a', { href: '#', data: { nav: 'atlas' } }, '← Atlas')),
    h('h2', {}, `Heads ${heads.map(data.label).join(', ')}`), place);
  const draw = async () => {
    const [cards, composition, spaces] = await Promise.all([data.cards(), data.composition(), data.spaces()]);
    const patterns = await Promise.all(heads.map((i) => (data.prompt?.pattern ? arrayRow(data.prompt.pattern, i) : null)));
    const columns = heads.map((i) => h('article.compare-card', {},
      h('h3', {}, headLink(i, { text: `Head ${data.label(i)}`, className: 'plain-link' })),
      cards[i].singular_values.length ? [spark(cards[i].singular_values), h('p.soft', {}, spectrumSentence(cards[i]))] : h('p.absent', {}, 'The weights of this head hold NaN or infinity.'),
      h('p.evidence', {}, evidence(cards[i])),
      (cards[i].directions ?? []).slice(0, 3).map((d, k) => h('div.short-direction', {},
        h('div.soft.num', {}, `direction ${k}, ${format(d.value)}, ${percent(d.energy)}${d.separable ? '' : ', not separable'}`),
        directionEnds(d, 4)))));
    const attention = patterns[0] ? h('section', {}, h('h3', {}, 'Attention on the prompt'), h('div.compare-cards', {}, heads.map((i, k) => h('figure', {}, h('figcaption', {}, headLink(i)),
      heatmap(data.prompt.tokens, patterns[k], { scale: makeScale(0, 1, false), label: `Attention pattern of head ${data.label(i)}`, say: 'attention' }))))) : null;
    const rows = [];
    let group = null;
    for (const score of data.scores) {
      if (score.group !== group) rows.push(h('tr.group', {}, h('th', { colspan: heads.length + 1, scope: 'colgroup' }, group = score.group)));
      rows.push(h('tr', {}, h('th', { scope: 'row', title: score.note }, score.label), heads.map((i) => {
        const v = data.value(score.key, i);
        return h('td.num', {}, isNumber(v) ? h('span.swatch', { style: { background: data.scale(score.key).at(v).css } }) : null, formatIn(data.scale(score.key), v));
      })));
    }
    place.replaceChildren(h('div.compare-cards', {}, columns), betweenHeads(heads, composition, spaces) ?? '', attention ?? '',
      h('section', {}, h('h3', {}, 'Scores'), h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Scores side by side' }, h('table.scores', {},
        h('thead', {}, h('tr', {}, h('th', { scope: 'col' }, 'Score'), heads.map((i) => h('th.num', { scope: 'col' }, data.label(i))))), h('tbody', {}, rows)))));
    updateTray();
  };
  return { node, title: 'Comparison', update: draw, focus: 'h2' };
}

/** What the chosen heads have to do with each other, as far as the file holds it: each pair's paths and shared write directions. */
function betweenHeads(heads, composition, spaces) {
  if (!composition && !spaces?.neighbours) return null;
  const chosen = new Set(heads);
  const paths = (composition?.paths ?? []).filter((path) => chosen.has(path.from) && chosen.has(path.to));
  const shared = heads.flatMap((i) => (spaces?.neighbours?.[i] ?? []).filter(([other]) => chosen.has(other) && (i < other || !spaces.neighbours[other].some(([back]) => back === i)))
    .map(([other, value, , z]) => ({ i, other, value, z })));
  const items = [
    ...paths.map((path) => [headLink(path.from), ' feeds ', headLink(path.to), ' by ', kindBadge(path.kind), ` ${format(path.value)}, z ${format(path.paired, { sign: true, digits: 2 })}`]),
    ...shared.map(({ i, other, value, z }) => [headLink(i), ' and ', headLink(other), ` share ${format(value)} write directions, z ${format(z, { sign: true, digits: 2 })}`]),
  ];
  return h('section', {}, h('h3', {}, 'Between them'), items.length ? h('ul.between', {}, items.map((item) => h('li', {}, item)))
    : h('p.soft', {}, 'No path between these heads is among each head’s strongest, nor do they share most write directions.'));
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
