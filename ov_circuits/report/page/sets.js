const SET_ROWS = 24;
const OTHER_ROWS = 10;

/** The view of a prompt set: means over its prompts, with intervals, by head and by named position. */
function setView() {
  const place = h('div.view-body', {}, h('p.loading', {}, 'Reading the prompt set in this file …'));
  const node = h('div.prompt', {}, h('header', {}, h('h2', {}, 'The prompt set')), place);
  let draw = () => {};
  data.promptSet().then((set) => {
    const made = setParts(set);
    node.querySelector('header').append(...made.head);
    place.replaceChildren(...made.parts);
    draw = made.draw;
    draw();
  });
  return { node, title: 'Prompt set', update: () => { draw(); updateTray(); }, focus: 'h2' };
}

const roleName = (role) => role.replace(/_/g, ' ');
const intervalText = ({ mean, low, high }, more = {}) => (isNumber(low) ? `${format(mean, { sign: true, ...more })} [${format(low, { sign: true })}, ${format(high, { sign: true })}]` : format(mean, { sign: true, ...more }));

function setParts(set) {
  const dropped = Object.entries(set.dropped);
  const head = [
    h('p.question', {}, h('code', {}, set.set), `, ${plural(set.prompts, 'prompt')}: ${set.quantity}`),
    h('p.facts', {}, 'On average ', h('b.num', {}, intervalText({ mean: set.difference, low: set.difference_low, high: set.difference_high })),
      `, positive for ${percent(set.share_right)} of the prompts. Brackets are ${percent(set.level)} intervals, ${set.interval}. `,
      dropped.length ? `Left out: ${dropped.map(([why, count]) => `${count} ${why}`).join('; ')}.` : null),
  ];
  const chosen = () => (state.setRole === null ? set.heads : set.roles[state.setRole]);
  const bars = h('div');
  const others = h('div');
  const lead = h('p.lead');
  const legendPlace = h('div');
  const key = () => (state.setRole === null ? 'set_mean' : 'set_role');
  const choices = [[null, 'All'], ...Object.keys(set.roles).map((role) => [role, roleName(role)])];
  const roles = h('div.segmented.wraps', { role: 'group', 'aria-label': 'From which tokens' }, choices.map(([role, text]) => h('button', {
    type: 'button', onclick: () => { state.setRole = role; draw(); },
  }, text)));
  const readRole = () => {
    if (state.setRole !== null) {
      data.replaceScore({ key: 'set_role', label: `Mean attribution from ${roleName(state.setRole)}`, diverging: true, range: null, note: '', source: '' }, set.roles[state.setRole].mean);
    }
  };
  readRole();
  const map = headMap({ key, label: 'Mean attribution of each head on the prompt set' });
  function draw() {
    readRole();
    [...roles.children].forEach((button, k) => button.setAttribute('aria-pressed', String(choices[k][0] === state.setRole)));
    map.update();
    legendPlace.replaceChildren(legend(data.scale(key()), data.values[key()], { label: 'Mean attribution' }));
    lead.replaceChildren(state.setRole === null
      ? 'The mean of what each head adds to the answer, with its interval: how far it would move with other prompts of the same kind.'
      : `The mean of what each head moves from ${roleName(state.setRole)} ${state.setRole === 'other' ? 'positions' : ''} to the answer.`);
    const { mean, low, high } = chosen();
    const rows = mean.map((value, i) => ({ mean: value, low: low[i], high: high[i], name: headLink(i), i })).filter((row) => isNumber(row.mean))
      .sort((a, b) => Math.abs(b.mean) - Math.abs(a.mean)).slice(0, SET_ROWS);
    bars.replaceChildren(whiskers(rows, 'Means by head, largest first'));
  }
  const whole = (rows) => rows.reduce((sum, row) => sum + (row.mean ?? 0), 0);
  let allOthers = false;
  /** The largest in the order of the stream, and the rest as one sum until it is asked for. */
  function drawOthers() {
    const large = new Set([...set.others].sort((a, b) => Math.abs(b.mean) - Math.abs(a.mean)).slice(0, OTHER_ROWS));
    const rest = set.others.filter((row) => !large.has(row));
    const rows = allOthers || rest.length < 3 ? set.others : [...set.others.filter((row) => large.has(row)), { name: `The other ${rest.length}`, mean: whole(rest) }];
    others.replaceChildren(whiskers(rows, 'Means of other components'), rest.length < 3 ? '' : h('button.quiet', {
      type: 'button', onclick: () => { allOthers = !allOthers; drawOthers(); others.querySelector('button').focus(); },
    }, allOthers ? `Show the ${OTHER_ROWS} largest` : `Show all ${set.others.length}`));
  }
  drawOthers();
  const headSum = whole(set.heads.mean.map((mean) => ({ mean })));
  const parts = [
    h('section', {}, h('h3', {}, 'Heads'), lead, h('div.field-note', {}, h('span.hint', {}, 'From '), roles),
      h('div.prompt-columns', {}, h('div', {}, bars), h('div.map-panel', {}, map.node, legendPlace))),
    h('section.set-others', {}, h('h3', {}, 'Everything else'), h('p.lead', {}, `All heads together add ${format(headSum, { sign: true })}, everything else ${format(whole(set.others), { sign: true })}. The two sum to the mean, but for a residual of ${format(set.residual, { sign: true })}.`), others),
    h('section', {}, h('h3', {}, 'Some of the prompts'), h('ol.set-prompts', {}, set.examples.map((prompt) => h('li', {},
      h('div.set-prompt', {}, prompt.tokens.map((token, k) => h('span.role-token', { title: prompt.roles[k] ? roleName(prompt.roles[k]) : null },
        tokenChip(token, { title: null }), prompt.roles[k] && prompt.roles[k] !== prompt.roles[k - 1] ? h('span.role', {}, roleName(prompt.roles[k])) : null))),
      h('p', {}, h('span.soft', {}, 'answer '), clipTokens(prompt.answer), prompt.foil.length ? [h('span.soft', {}, ' against '), clipTokens(prompt.foil)] : null))))),
  ];
  return { head, parts, draw };
}

const clipTokens = (tokens) => [tokens.slice(0, 6).map((token, k) => [k ? ' ' : '', tokenChip(token)]), tokens.length > 6 ? h('span.soft', {}, ` and ${tokens.length - 6} more`) : null];

/** Bars from zero with intervals as whiskers, one to a row. */
function whiskers(rows, caption) {
  const ends = rows.flatMap((row) => [row.mean, row.low, row.high]).filter(isNumber);
  const [lo, hi] = [Math.min(0, ...ends), Math.max(0, ...ends)];
  const at = (v) => ((v - lo) / (hi - lo || 1)) * 100;
  const digits = scaleOf(ends, true);
  const certain = rows.some((row) => isNumber(row.low));
  return h(certain ? 'table.account.whiskers.certain' : 'table.account.whiskers', {}, h('caption.visually-hidden', {}, caption),
    h('thead.visually-hidden', {}, h('tr', {}, (certain ? ['Component', 'Mean and interval', 'Mean', 'Interval'] : ['Component', 'Bar', 'Value']).map((t) => h('th', { scope: 'col' }, t)))),
    h('tbody', {}, rows.map((row) => h('tr', {}, h('th', { scope: 'row' }, row.name),
      h('td.track', {}, h('span.zero-line', { style: { left: `${at(0)}%` } }),
        h(`span.step.${row.mean < 0 ? 'down' : 'up'}`, { style: { left: `${at(Math.min(0, row.mean))}%`, width: `${Math.max(0.3, Math.abs(at(row.mean) - at(0)))}%` } }),
        isNumber(row.low) ? h('span.whisker', { style: { left: `${at(row.low)}%`, width: `${at(row.high) - at(row.low)}%` } }) : null),
      h('td.num', {}, formatIn(digits, row.mean)),
      certain ? h('td.num.soft.interval', {}, isNumber(row.low) ? `${formatIn(digits, row.low)} to ${formatIn(digits, row.high)}` : '') : null))));
}
