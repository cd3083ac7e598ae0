const documentRead = new Promise((done) => {
  if (document.readyState !== 'loading') done();
  else document.addEventListener('DOMContentLoaded', () => done());
});

async function blockBytes(name) {
  const id = `block-${name}`;
  // While the file is still being read, a block is whole when something stands behind it.
  if (!document.getElementById(id)?.nextSibling) await documentRead;
  const element = document.getElementById(id);
  const binary = atob(element.textContent);
  const packed = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) packed[i] = binary.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).arrayBuffer();
}

const blockText = async (name) => new TextDecoder().decode(await blockBytes(name));

/** Calls `make` once, and hands the same promise to everyone after. */
function once(make) {
  let made = null;
  return () => (made ??= make());
}

function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const arrayBuffers = new Map();

/** Row `index` of the first axis of an array of the payload, as numbers. */
async function arrayRow(spec, index) {
  if (!arrayBuffers.has(spec.block)) arrayBuffers.set(spec.block, blockBytes(spec.block));
  const buffer = await arrayBuffers.get(spec.block);
  const size = spec.shape.slice(1).reduce((a, b) => a * b, 1);
  const scale = spec.scale ?? 1;
  if (spec.dtype === 'f4') return new Float32Array(buffer, index * size * 4, size).map((v) => v * scale);
  if (spec.dtype === 'u1') return Float32Array.from(new Uint8Array(buffer, index * size, size), (v) => v * scale);
  const words = new Uint16Array(buffer, index * size * 2, size);
  const read = spec.dtype === 'f2' ? halfToNumber : (v) => v;
  return Float32Array.from(words, (v) => read(v) * scale);
}
