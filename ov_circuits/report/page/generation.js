/** A continuation: each step's token beside its runner-up, and who made the difference. */
function generationView(step) {
  const place = h('div.view-body', {}, h('p.loading', {}, 'Reading the continuation in this file …'));
  const node = h('div.prompt', {}, h('header', {}, h('h2', {}, 'The continuation')), place);
  let draw = () => {};
  data.generation().then((generation) => {
    const made = generationParts(generation, Math.min(step, generation.steps.length - 1));
    node.querySelector('header').append(...made.head);
    place.replaceChildren(...made.parts);
    draw = made.draw;
    draw();
  });
  return { node, title: 'Continuation', update: () => { draw(); updateTray(); }, focus: 'h2' };
}

const HEADS_A_STEP = 3;
const strongestHeads = (values, count) => [...values].map((v, i) => [v, i]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]) || a[1] - b[1]).slice(0, count);

function generationParts(generation, step) {
  const { steps, tokens, start } = generation;
  const chosen = steps[step];
  const strip = h('div');
  const table = h('div');
  const account = h('div');
  const heads = h('div');
  const legendPlace = h('div');
  const KEY = 'generation_step';
  const title = { key: KEY, label: `Attribution of ${tokenText(chosen.token)}, step ${step + 1},`, diverging: true, range: null, note: '', source: '' };
  data.replaceScore(title, Array(data.count).fill(null));
  const map = headMap({ key: () => KEY, label: 'Attribution of each head at the chosen step' });
  const choose = (position) => { if (position >= start) go(`generation/${position - start + 1}`); };

  async function draw() {
    const values = await Promise.all(steps.map((_, k) => arrayRow(generation.head_value, k)));
    data.replaceScore(title, [...values[step]]);
    map.update();
    legendPlace.replaceChildren(legend(data.scale(KEY), data.values[KEY], { label: 'Attribution' }));
    const scale = scaleOf(chosen.sources, true);
    strip.replaceChildren(h('div.strip', {}, tokenStrip(tokens, chosen.sources, {
      scale, answerAt: tokens.length - 1, mark: chosen.position, label: 'Prompt and continuation, coloured by the attribution that flows from each token through all heads to the chosen step',
      choose, chosen: start + step, from: start,
    }), legend(scale, chosen.sources, { label: 'Attribution' })));
    const digits = scaleOf(steps.map((one) => one.difference), true);
    const of = scaleOf(values.flatMap((row) => [...row]), true);
    table.replaceChildren(h('div.scroll', { tabindex: '0', role: 'group', 'aria-label': 'Steps' }, h('table.steps', {},
      h('caption.visually-hidden', {}, 'Steps of the continuation'),
      h('thead', {}, h('tr', {}, [['Step'], ['Chosen'], ['', 'num'], ['Runner-up'], ['', 'num'], ['Difference', 'num'], ['Strongest heads']].map(([t, c], k) =>
        h(c ? `th.${c}` : 'th', { scope: 'col' }, t || h('span.visually-hidden', {}, k === 2 ? 'Probability' : 'Its probability'))))),
      h('tbody', {}, steps.map((one, k) => h(k === step ? 'tr.chosen' : 'tr', {},
        h('th', { scope: 'row' }, h('a', { href: `#generation/${k + 1}`, 'aria-current': k === step ? 'true' : null }, String(k + 1))),
        h('td', {}, tokenChip(one.token)), h('td.num', {}, format(one.probability)),
        h('td', {}, tokenChip(one.runner_up)), h('td.num.soft', {}, format(one.runner_up_probability)),
        h('td.num', {}, formatIn(digits, one.difference)),
        h('td', {}, h('span.step-heads', {}, strongestHeads(values[k], HEADS_A_STEP).map(([v, i]) => h('span.nowrap', {}, headLink(i), ' ', h('span.num.soft', {}, formatIn(of, v))))))))))));
    const sum = new Map(chosen.components.map((c) => [c.component, c.value]));
    account.replaceChildren(whiskers([...sum].map(([name, value]) => ({ name: generation.component_names[name] ?? name, mean: value })), 'The account of the step by kind'),
      h('p.hint', {}, `They sum to ${format(chosen.total, { sign: true, digits: 4 })}; the model’s own difference is ${format(chosen.difference, { sign: true, digits: 4 })}, residual ${format(chosen.residual, { sign: true })}.`));
    heads.replaceChildren(h('h4', {}, 'Strongest heads'), h('ol.ranking', {}, strongestHeads(values[step], 10).map(([v, i]) => h('li', {}, h('span', {}, headLink(i), h('span.soft', {}, ' most from '), tokenChip(tokens[generation.head_source[step][i]])),
      h('span.num', {}, formatIn(data.scale(KEY), v))))));
  }
  const head = [h('p.facts', {}, `${plural(steps.length, 'token')} ${generation.greedy ? 'that the model itself found likeliest' : 'that were given'}, after ${plural(start, 'token')} of prompt. `,
    generation.ended ? 'Then it ended the text. ' : null, generation.bos_added ? 'A beginning-of-text token was put in front of the prompt.' : null)];
  const parts = [
    h('section', {}, h('h3', {}, 'Step by step'), h('p.lead', {}, 'Why this token and not the runner-up: each step is the account of the difference of their logits. Choose a step, here or in the text.'), table),
    h('section', {}, h('h3', {}, `Step ${step + 1}: `, tokenChip(chosen.token), h('span.soft', {}, ' against '), tokenChip(chosen.runner_up)), strip),
    h('div.prompt-columns', {}, h('section', {}, h('h3', {}, 'The account'), account, heads), h('section', {}, h('h3', {}, 'Heads'), map.node, legendPlace)),
  ];
  return { head, parts, draw };
}
