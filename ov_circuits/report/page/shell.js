const FAMILIES = { gpt2: 'GPT-2 style', llama: 'Llama style', gptneox: 'GPT-NeoX style' };

function pageHeader() {
  const { meta } = data;
  const facts = [
    FAMILIES[meta.family] ?? meta.family,
    data.grouped ? `${meta.n_layers} layers × ${meta.n_heads} query heads on ${plural(meta.n_kv_heads, 'key/value head')}` : `${meta.n_layers} layers × ${meta.n_heads} heads`,
    `d_model ${meta.d_model}`, `d_head ${meta.d_head}`, meta.norm,
    meta.positions === 'none' ? 'no positions' : `${meta.positions} positions`,
    meta.n_vocab ? `${wholeNumber(meta.n_vocab)} tokens, ${meta.tied ? 'tied' : 'untied'}` : null,
    meta.n_parameters ? parameters(meta.n_parameters) : null,
  ].filter(Boolean);
  const themeButton = h('button.quiet.theme', { type: 'button', onclick: toggleTheme }, '');
  themeButton.id = 'theme';
  return h('header.masthead', {},
    h('div.masthead-line', {}, h('a.wordmark', { href: '#', data: { nav: 'atlas' } }, 'ov_circuits'),
      h('nav.views', { 'aria-label': 'Views' }, h('a', { href: '#', data: { nav: 'atlas' } }, 'Atlas'),
        data.holds('composition') ? h('a', { href: '#paths', data: { nav: 'paths' } }, 'Composition') : null,
        data.prompt ? h('a', { href: '#prompt', data: { nav: 'prompt' } }, 'Prompt') : null,
        data.holds('generation') ? h('a', { href: '#generation', data: { nav: 'generation' } }, 'Continuation') : null,
        data.holds('prompt_set') ? h('a', { href: '#set', data: { nav: 'set' } }, 'Prompt set') : null),
      themeButton),
    h('h1', {}, meta.model),
    h('p.facts', {}, facts.map((fact, k) => [h('span', {}, k < facts.length - 1 ? `${fact}\u2002·` : fact), '\u2002'])),
    h('div.pledges', {},
      h('details', {}, h('summary', {}, 'Weights: ', h('b', {}, meta.view)), h('div.pop', {}, h('p', {}, meta.view_note), meta.source ? h('p.soft', {}, 'From ', h('code', {}, meta.source)) : null)),
      certificate(meta.certificate),
      meta.notes?.length ? h('details', {}, h('summary', {}, plural(meta.notes.length, 'note')), h('div.pop', {}, h('ul', {}, meta.notes.map((note) => h('li', {}, note))))) : null));
}

function parameters(n) {
  if (n >= 1e9) return `${format(n / 1e9, { digits: 3 })} B parameters`;
  return n >= 1e6 ? `${format(n / 1e6, { digits: 3 })} M parameters` : `${wholeNumber(n)} parameters`;
}

function certificate(made) {
  if (!made) return h('span.pledge.soft', {}, 'Identities not checked');
  const counted = made.checks.filter((check) => check.passed !== null);
  const passed = counted.filter((check) => check.passed).length;
  const skipped = made.checks.length - counted.length;
  const word = (check) => (check.passed === null ? 'not checked' : check.passed ? 'holds' : 'fails');
  return h('details', {},
    h(made.passed ? 'summary.good' : 'summary.bad', {}, made.passed ? '✓ ' : '✗ ', `${passed} of ${plural(counted.length, 'identity', 'identities')} hold${counted.length === 1 ? 's' : ''}`, skipped ? h('span.soft', {}, `, ${skipped} not checked`) : null),
    h('div.pop.wide', {}, h('table.certificate', {},
      h('thead', {}, h('tr', {}, ['Identity', '', 'Error', 'Limit'].map((t) => (t ? h('th', { scope: 'col' }, t) : h('td', {}))))),
      h('tbody', {}, made.checks.map((check) => h('tr', {},
        h('th', { scope: 'row' }, check.name, check.meaning ? h('span.meaning', {}, check.meaning) : null, check.detail ? h('span.soft.detail', {}, check.detail) : null),
        h(`td.${check.passed === null ? 'soft' : check.passed ? 'good' : 'bad'}`, {}, word(check)),
        h('td.num', {}, format(check.value, { digits: 2 })), h('td.num', {}, format(check.limit, { digits: 2 }))))))));
}

// ----------------------------------------------------------------------------------------------------------------- theme, routes

const THEME_KEY = 'ov-circuits-theme';

/** In a notebook the page looks as what stands around it, unless the reader chooses: it asks, and its frame's neighbour answers. */
function followNotebook() {
  if (parent === window) return;
  addEventListener('message', ({ source, data: said }) => {
    const theme = source === parent ? said?.ovTheme : null;
    if (themeFrom === 'reader' || (theme !== 'light' && theme !== 'dark')) return;
    themeFrom = 'notebook';
    if (theme !== document.documentElement.dataset.theme) setTheme(theme);
  });
  parent.postMessage('ov-circuits page', '*');
}

let themeFrom = 'system';

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  ramps = null;
  nameTheme();
  view?.update();
}

function nameTheme() {
  document.getElementById('theme').textContent = document.documentElement.dataset.theme === 'dark' ? 'Light page' : 'Dark page';
}

function toggleTheme() {
  const theme = document.documentElement.dataset.theme === 'dark' ? 'light' : 'dark';
  // In a notebook frame or a private window there is no storage; the choice then lasts as long as the page.
  try { localStorage.setItem(THEME_KEY, theme); } catch { /* nothing to keep it in */ }
  themeFrom = 'reader';
  setTheme(theme);
}

/** An address as text; one that a mail program broke (`%` alone) is taken as it stands. */
function addressText(hash) {
  const text = hash.replace(/^#/, '');
  try { return decodeURIComponent(text); } catch { return text; }
}

const parseRoute = (hash) => ({ ...routeOf(addressText(hash)), address: addressText(hash) });

function routeOf(text) {
  const one = (label) => {
    const match = /^(?:L(\d+)H(\d+)|(\d+)\.(\d+))$/i.exec(label.trim());
    return match ? data.index(Number(match[1] ?? match[3]), Number(match[2] ?? match[4])) : null;
  };
  if (text === 'prompt' && data.prompt) return { name: 'prompt' };
  if (text === 'set' && data.holds('prompt_set')) return { name: 'set' };
  const step = /^generation(?:\/(\d+))?$/.exec(text);
  if (step && data.holds('generation')) return { name: 'generation', step: Math.max(0, Number(step[1] ?? 1) - 1) };
  if (text === 'paths' && data.holds('composition')) return { name: 'paths', head: null };
  if (text.startsWith('paths/') && data.holds('composition') && one(text.slice(6)) !== null) return { name: 'paths', head: one(text.slice(6)) };
  const compared = text.startsWith('compare/') ? text.slice(8).split(',').map(one) : [];
  if (compared.length && !compared.includes(null)) return { name: 'compare', heads: [...new Set(compared)] };
  const head = one(text);
  if (head !== null) return { name: 'head', head };
  return { name: 'atlas', unknown: text && text !== 'main-content' ? text : null };
}

/** Moves to a view through the address, so that back works; where there is no address (some notebook frames), directly. */
function go(route) {
  keepPlace();
  try {
    if (location.hash.replace(/^#/, '') !== route) {
      location.hash = route;
      return;
    }
  } catch { /* a frame without an address */ }
  show(parseRoute(route));
}

let view = null;
let main = null;

/** Where each address was left: how far down, how tall it was, and what had the focus. Back leads there, and so does the way to the atlas. */
const places = new Map();

function keepPlace() {
  const { dataset, tagName } = document.activeElement;
  const focused = dataset.key !== undefined ? `.map [data-key="${dataset.key}"]` : tagName === 'A' ? `a[href="${document.activeElement.getAttribute('href')}"]` : null;
  places.set(state.route.address, { y: scrollY, height: main.offsetHeight, focused });
}

/** An entry of the history that was shown before is one that back or forward leads to. Some notebook frames have no history. */
function markEntry() {
  try { history.replaceState('shown', ''); } catch { /* every entry is a new one */ }
}

function show(route, again = false) {
  hideTooltip();
  const left = state.route;
  state.route = route;
  markEntry();
  view = {
    atlas: () => atlasView(), head: () => headView(route.head), prompt: () => promptView(), paths: () => pathsView(route.head), compare: () => compareView(route.heads),
    set: () => setView(), generation: () => generationView(route.step),
  }[route.name]();
  main.replaceChildren(...[
    route.unknown ? h('p.message', { role: 'alert' }, `There is no head or view “${clip(route.unknown, 40)}” on this page; this is the atlas.`) : null, view.node,
  ].filter(Boolean));
  document.body.dataset.view = route.name;
  document.title = route.name === 'atlas' ? data.payload.title : `${view.title} · ${data.payload.title}`;
  for (const link of document.querySelectorAll('.views a')) {
    if (link.dataset.nav === route.name) link.setAttribute('aria-current', 'page');
    // Heads and their comparison are rooms of the atlas.
    else if (link.dataset.nav === 'atlas' && ['head', 'compare'].includes(route.name)) link.setAttribute('aria-current', 'true');
    else link.removeAttribute('aria-current');
  }
  view.update();
  if (left === null) return;
  const place = again || route.name === 'atlas' ? places.get(route.address) : null;
  const focused = (place?.focused && main.querySelector(place.focused)) ?? (left.name === 'head' ? main.querySelector(`.atlas .map [data-key="${left.head}"]`) : null);
  if (focused) focused.focus({ preventScroll: true });
  else if (view.focus) {
    const heading = view.node.querySelector(view.focus);
    heading.tabIndex = -1;
    heading.focus({ preventScroll: true });
  }
  // Parts that are still being read will take their room again; until then it is kept free.
  main.style.minHeight = place ? `${place.height}px` : '';
  if (place) setTimeout(() => { if (state.route === route) main.style.minHeight = ''; }, 2000);
  scrollTo(0, place?.y ?? (route.name === 'atlas' ? 0 : Math.min(scrollY, main.offsetTop - 16)));
}

/** The table that stands in for the page, and why. */
function showTable(why) {
  document.querySelector('.static p').textContent = why;
  document.documentElement.classList.remove('js');
}

async function start() {
  const page = document.getElementById('page');
  if (typeof DecompressionStream === 'undefined') {
    showTable('This page needs a browser of 2023 or later, to unpack its data with DecompressionStream. Here is the table of heads alone.');
    return;
  }
  data = prepare(JSON.parse(await blockText('core')));
  const keys = data.scores.map((score) => score.key);
  state.score = ['eigen_copying_full', 'eigen_copying_ov'].find(data.has) ?? keys[0];
  state.x = state.score;
  state.y = keys.find((key) => key.includes('frobenius')) ?? keys.find((key) => key !== state.x) ?? state.x;
  main = h('main', { id: 'main-content', tabindex: '-1' });
  page.replaceChildren(pageHeader(), main, h('footer.foot', {}, `ov_circuits ${data.meta.version}. One file, no requests: everything shown is inside it.`), tray, tooltip);

  nameTheme();

  addEventListener('hashchange', () => {
    if (location.hash === '#main-content') return;
    const again = history.state === 'shown';
    if (again) keepPlace();
    show(parseRoute(location.hash), again);
  });
  document.addEventListener('click', (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    event.preventDefault();
    if (link.classList.contains('skip')) main.focus();
    else go(link.getAttribute('href').slice(1));
  });
  document.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape') return;
    hideTooltip();
    const open = document.querySelector('details[open] .pop')?.parentElement;
    if (open) { open.open = false; open.querySelector('summary').focus(); }
    else if (state.route.name !== 'atlas' && !/INPUT|SELECT/.test(event.target.tagName)) go('');
  });
  // One explanation open at a time; a click elsewhere closes it.
  document.addEventListener('click', (event) => {
    for (const open of document.querySelectorAll('.pledges details[open]')) if (!open.contains(event.target)) open.open = false;
  });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', (event) => {
    let kept = null;
    try { kept = localStorage.getItem(THEME_KEY); } catch { /* no storage */ }
    if (!kept && themeFrom === 'system') setTheme(event.matches ? 'dark' : 'light');
  });
  // Paper is light. The choice of the reader comes back after.
  let onScreen = null;
  addEventListener('beforeprint', () => { onScreen = document.documentElement.dataset.theme; if (onScreen === 'dark') setTheme('light'); });
  addEventListener('afterprint', () => { if (onScreen === 'dark') setTheme('dark'); });

  // Parts of a view come after it, so the page itself goes back to where the reader was.
  history.scrollRestoration = 'manual';
  show(parseRoute(location.hash));
  followNotebook();
  document.querySelector('.static').remove();
  document.documentElement.dataset.ready = 'true';
}

start().catch((error) => {
  showTable(`This page could not be read (${error.message}). Here is the table of heads alone.`);
  throw error;
});
