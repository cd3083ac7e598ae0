const SVG = 'http://www.w3.org/2000/svg';

/** An element. Strings among the children become text nodes; there is no way to hand in markup. */
function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split('.');
  return fill(document.createElement(name || 'div'), classes, properties, children);
}

/** The same for SVG. */
function s(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split('.');
  return fill(document.createElementNS(SVG, name), classes, properties, children);
}

function fill(element, classes, properties, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith('on')) element.addEventListener(key.slice(2), value);
    else if (key === 'style') for (const [name, v] of Object.entries(value)) element.style.setProperty(name, v);
    else if (key === 'data') Object.assign(element.dataset, value);
    else if (key === 'value' || key === 'checked' || key === 'selected') element[key] = value;
    else element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const CHIP_LENGTH = 32;

/** A token as a small block: marks in their own colour, direction isolated, clipped when very long. */
function tokenChip(token, { tint = null, title = null, tag = 'bdi.token', ...properties } = {}) {
  const runs = tokenRuns(token);
  const total = runs.reduce((n, run) => n + [...run.text].length, 0);
  let room = CHIP_LENGTH;
  const parts = [];
  for (const run of runs) {
    if (room <= 0) break;
    const text = clip(run.text, room);
    room -= [...text].length;
    parts.push(run.mark ? h(run.text.length > 1 ? 'span.mark.code' : 'span.mark', {}, text) : text);
  }
  const style = tint ? { background: tint.css, color: tint.ink } : {};
  const full = title ?? (total > CHIP_LENGTH ? tokenText(token) : null);
  return h(tint ? `${tag}.tinted` : tag, { dir: 'ltr', style, title: full, ...properties }, parts);
}

const tooltip = h('div.tooltip', { 'aria-hidden': 'true', hidden: true });

function showTooltip(content, x, y) {
  tooltip.replaceChildren(...[content].flat(Infinity).filter(Boolean));
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = Math.min(Math.max(8, x + 14), innerWidth - width - 8);
  const top = y + 18 + height > innerHeight ? y - height - 12 : y + 18;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${Math.max(8, top)}px`;
}

const hideTooltip = () => { tooltip.hidden = true; };

/** Calls `describe(key)` while the pointer or the focus is on a child that carries `data-key`. */
function tellOnHover(container, describe) {
  const target = (event) => event.target.closest?.('[data-key]');
  container.addEventListener('pointermove', (event) => {
    const element = target(event);
    if (element && container.contains(element)) showTooltip(describe(element.dataset.key), event.clientX, event.clientY);
    else hideTooltip();
  });
  container.addEventListener('pointerleave', hideTooltip);
  container.addEventListener('focusin', (event) => {
    const element = target(event);
    if (!element || !element.matches(':focus-visible')) return;
    const box = element.getBoundingClientRect();
    showTooltip(describe(element.dataset.key), box.right - 10, box.bottom - 12);
  });
  container.addEventListener('focusout', hideTooltip);
  return container;
}

/** W_V W_O with its letters below the line. */
const formula = (text) => h('span.formula', {}, text.split(/(_[A-Z])/).map((part) => (/^_[A-Z]$/.test(part) ? h('sub', {}, part[1]) : part)));

/** Running text in which W_V, or a product of such, is a formula. */
const withFormulas = (text) => text.split(/(W_[A-Z](?: W_[A-Z])*)/).map((part, k) => (k % 2 ? formula(part) : part));

const section = (title, lead, ...children) =>
  h('section', {}, h('h3', {}, title), lead ? h('p.lead', {}, lead) : null, ...children);
