function cssColour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
}

const toLinear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const fromLinear = (c) => (c <= 0.0031308 ? 12.92 * c : 1.055 * c ** (1 / 2.4) - 0.055);

/* Colours are mixed in Oklab (Ottosson 2020), where equal steps look equal. */
function toOklab(rgb) {
  const [r, g, b] = rgb.map(toLinear);
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

function fromOklab([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((c) => Math.min(1, Math.max(0, fromLinear(Math.min(1, Math.max(0, c))))));
}

const luminance = (rgb) => {
  const [r, g, b] = rgb.map(toLinear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

const RAMP_STEPS = 128;

/** 2 * 128 + 1 colours from the stops in the style sheet, each with the ink (black or white) that reads best on it. */
function makeRamp(names) {
  const stops = names.map((name) => toOklab(cssColour(name)));
  return Array.from({ length: 2 * RAMP_STEPS + 1 }, (_, i) => {
    const at = (i / (2 * RAMP_STEPS)) * (stops.length - 1);
    const low = Math.min(stops.length - 2, Math.floor(at));
    const rgb = fromOklab(stops[low].map((v, k) => v + (stops[low + 1][k] - v) * (at - low)));
    const bytes = rgb.map((c) => Math.round(c * 255));
    const light = luminance(rgb);
    return { css: `rgb(${bytes.join(' ')})`, bytes, ink: 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? '#ffffff' : '#000000' };
  });
}

let ramps = null;
const currentRamps = () => (ramps ??= {
  diverging: makeRamp(['--diverging-1', '--diverging-2', '--diverging-3', '--diverging-4', '--diverging-5']),
  sequential: makeRamp(['--sequential-1', '--sequential-2', '--sequential-3', '--sequential-4']),
});

/** Maps values to colours. A diverging scale is centred on zero, whatever the data. */
function makeScale(low, high, diverging) {
  const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const [lo, hi] = diverging ? [-reach, reach] : [low, high > low ? high : low + 1];
  const at = (value) => {
    const share = Math.min(1, Math.max(0, (value - lo) / (hi - lo)));
    return currentRamps()[diverging ? 'diverging' : 'sequential'][Math.round(share * 2 * RAMP_STEPS)];
  };
  return { lo, hi, diverging, at };
}

function scaleOf(values, diverging, range = null) {
  if (range && isNumber(range[0]) && isNumber(range[1])) return makeScale(range[0], range[1], diverging);
  let low = Infinity;
  let high = -Infinity;
  for (const v of values) {
    if (!isNumber(v)) continue;
    if (v < low) low = v;
    if (v > high) high = v;
  }
  if (low > high) [low, high] = [0, 1];
  // Magnitudes start at zero unless all of them lie far from it.
  if (!diverging && low > 0 && low < 0.5 * high) low = 0;
  return makeScale(low, high, diverging);
}
