/** The layer as an axis: known like a score, but on no list of them. */
const LAYER = 'layer';

/** What the page knows about the model, prepared once. */
function prepare(payload) {
  const { meta, values } = payload;
  const nHeads = meta.n_heads;
  const count = meta.n_layers * nHeads;
  const groupSize = Math.max(1, Math.floor(nHeads / (meta.n_kv_heads || nHeads)));
  const scores = [...payload.scores];
  const prompt = payload.prompt ?? null;
  if (prompt?.head_value && !scores.some((score) => score.key === 'prompt_value')) {
    scores.unshift({
      key: 'prompt_value', label: 'Attribution on this prompt', group: 'Prompt', diverging: true, range: null,
      source: 'direct logit attribution, value path, all source tokens', note: `What the head adds to the ${prompt.quantity}.`,
    });
    values.prompt_value = prompt.head_value;
  }
  // Scores of one group stand together, groups in the order of their first score.
  const groups = [...new Set(scores.map((score) => score.group))];
  scores.sort((a, b) => groups.indexOf(a.group) - groups.indexOf(b.group));
  const byKey = new Map(scores.map((score) => [score.key, score]));
  byKey.set(LAYER, { key: LAYER, label: 'Layer', diverging: false, range: null });
  values[LAYER] = Array.from({ length: count }, (_, i) => Math.floor(i / nHeads));
  const scales = new Map();
  const sorted = new Map();
  const later = new Set(payload.later);
  const read = new Map();
  /** A section of the payload, inflated when it is first asked for; null where the payload has none. */
  const laterSection = (name) => {
    if (!read.has(name)) read.set(name, later.has(name) ? blockText(name).then(JSON.parse) : Promise.resolve(payload[name] ?? null));
    return read.get(name);
  };
  let cardsRead = null;
  const cards = once(async () => (cardsRead = await laterSection('cards')));
  return {
    payload, meta, scores, values, prompt, count, nHeads, groupSize, byKey,
    grouped: groupSize > 1,
    tokens: payload.tokens ?? [],
    layerOf: (i) => Math.floor(i / nHeads),
    headOf: (i) => i % nHeads,
    groupOf: (i) => Math.floor((i % nHeads) / groupSize),
    label: (i) => `${Math.floor(i / nHeads)}.${i % nHeads}`,
    index: (layer, head) => (layer >= 0 && layer < meta.n_layers && head >= 0 && head < nHeads ? layer * nHeads + head : null),
    value: (key, i) => values[key]?.[i] ?? null,
    scale(key) {
      if (!scales.has(key)) scales.set(key, scaleOf(values[key], byKey.get(key).diverging, byKey.get(key).range));
      return scales.get(key);
    },
    replaceScore(score, list) {
      byKey.set(score.key, score);
      values[score.key] = list;
      scales.delete(score.key);
      sorted.delete(score.key);
    },
    /** 1 is the largest value of all heads. */
    rank(key, i) {
      if (!sorted.has(key)) sorted.set(key, values[key].filter(isNumber).sort((a, b) => b - a));
      const list = sorted.get(key);
      const v = values[key][i];
      if (!isNumber(v)) return null;
      let [low, high] = [0, list.length];
      while (low < high) { const mid = (low + high) >> 1; if (list[mid] > v) low = mid + 1; else high = mid; }
      return { rank: low + 1, of: list.length, equal: list[0] === list.at(-1) };
    },
    has: (key) => byKey.has(key),
    holds: (name) => later.has(name),
    cards,
    /** A head's card where the cards have been read; else null, and they are being read. */
    cardNow(i) {
      if (!cardsRead) cards();
      return cardsRead?.[i] ?? null;
    },
    search: () => laterSection('search'),
    spaces: () => laterSection('spaces'),
    examples: () => laterSection('examples'),
    promptSet: () => laterSection('prompt_set'),
    generation: () => laterSection('generation'),
    composition: once(async () => {
      const section = await laterSection('composition');
      return section && pathsOf(section);
    }),
  };
}

/** The section of composition with its parallel lists as one object a path, strongest first. */
function pathsOf(section) {
  const paths = section.sender.map((from, k) => ({
    from, to: section.receiver[k], kind: section.kind[k], value: section.value[k], chance: section.null_mean[k], z: section.z[k],
    paired: section.z_paired[k],
  }));
  return { ...section, paths, flagged: (path) => isNumber(section.fdr[path.kind]) && path.paired >= section.fdr[path.kind] };
}

let data = null;

const state = {
  route: null,
  score: null, x: null, y: null,
  filterText: '', filter: null, filterError: null, filterNotes: [],
  reads: '', writes: '', hits: null,
  brushed: null, boxes: [],
  sort: { key: null, descending: true },
  allColumns: false, allRows: false,
  compare: new Set(),
  setRole: null,
  promptHead: null, promptSource: null, accountBy: 'kind',
  pathKinds: new Set(['Q', 'K', 'V']), pathLeast: null,
};

function resolveName(name) {
  const lower = name.toLowerCase();
  const place = new Map([['layer', data.layerOf], ['head', data.headOf], ['kv', data.groupOf]]).get(lower);
  if (place) return place;
  const columns = new Map(data.scores.map(({ key }) => [key, (i) => data.value(key, i)]));
  // `_z` behind a name, or a part of one, is the score's distance from chance.
  const z = new Map(Object.entries(data.payload.chance ?? {}).map(([key, chance]) => [`${key}_z`, (i) => chance.z[i]]));
  const [keys, part] = lower.endsWith('_z') ? [[...columns.keys(), ...z.keys()], lower.slice(0, -2)] : [[...columns.keys()], lower];
  const exact = keys.find((key) => key.toLowerCase() === lower);
  const near = exact ? [exact] : keys.filter((key) => key.toLowerCase().includes(part) && (part === lower || key.endsWith('_z')));
  if (near.length > 1) state.filterNotes.push(`“${name}” is taken for ${near[0]}; ${near.slice(1, 5).join(', ')}${near.length > 5 ? ', …' : ''} would fit as well.`);
  if (near.length) return columns.get(near[0]) ?? z.get(near[0]);
  throw new FilterError(`there is no score “${name}”; the names are listed below`);
}

function isShown(i) {
  return (!state.filter || state.filter(i)) && (!state.hits || state.hits.heads.has(i)) && (!state.brushed || state.brushed.has(i));
}

const narrowed = () => Boolean(state.filter || state.hits || state.brushed);

function describeHead(key, i) {
  const score = data.byKey.get(key);
  const rank = data.rank(key, i);
  return [
    h('strong', {}, `Head ${data.label(i)}`),
    data.grouped ? h('span.soft', {}, ` · key/value head ${data.groupOf(i)}`) : null,
    h('div', {}, `${score.label} `, h('b.num', {}, format(data.value(key, i), { sign: score.diverging }))),
    h('div.soft', {}, !rank ? 'not defined for this head' : rank.equal ? 'equal in all heads' : `${rank.rank} of ${rank.of}, largest first`),
    strongestEnds(i),
  ];
}
