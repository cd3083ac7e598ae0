/*  or      := and ('or' and)*
 *  and     := not ('and' not)*
 *  not     := 'not' not | compare
 *  compare := value (('<' | '<=' | '>' | '>=' | '==' | '!=') value)*      chains: 0.2 < x < 0.5
 *  value   := number | name | '-' value | 'abs' '(' value ')' | '(' or ')'
 */
function parseFilter(text, resolve) {
  const pattern = /\s*(?:(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([\p{L}_][\p{L}\p{N}_.@]*)|(<=|>=|==|!=|&&|\|\||[<>=≤≥≠!()\-−]))/uy;
  const tokens = [];
  let at = 0;
  const rest = text.trimEnd();
  while (at < rest.length) {
    pattern.lastIndex = at;
    const match = pattern.exec(rest);
    if (!match) throw new FilterError(`“${rest.slice(at).trim()[0]}” is not part of a filter`);
    const [, number, word, symbol] = match;
    const same = { '=': '==', '≤': '<=', '≥': '>=', '≠': '!=', '−': '-', '&&': 'and', '||': 'or', '!': 'not' };
    if (number) tokens.push({ kind: 'number', value: Number(number) });
    else if (word && ['and', 'or', 'not'].includes(word.toLowerCase())) tokens.push({ kind: word.toLowerCase() });
    else if (word) tokens.push({ kind: 'name', value: word });
    else tokens.push({ kind: same[symbol] ?? symbol });
    at = pattern.lastIndex;
  }
  let next = 0;
  const peek = () => tokens[next]?.kind;
  const take = (kind) => (peek() === kind ? tokens[next++] : null);
  const say = (token) => (token ? `“${token.value ?? token.kind}”` : 'the end');

  function parseOr() {
    let left = parseAnd();
    while (take('or')) { const [a, b] = [left, truth(parseAnd())]; truth(a); left = { type: 'truth', of: (i) => a.of(i) || b.of(i) }; }
    return left;
  }
  function parseAnd() {
    let left = parseNot();
    while (take('and')) { const [a, b] = [left, truth(parseNot())]; truth(a); left = { type: 'truth', of: (i) => a.of(i) && b.of(i) }; }
    return left;
  }
  function parseNot() {
    if (!take('not')) return parseCompare();
    const inner = truth(parseNot());
    return { type: 'truth', of: (i) => !inner.of(i) };
  }
  const compares = {
    '<': (a, b) => a < b, '<=': (a, b) => a <= b, '>': (a, b) => a > b, '>=': (a, b) => a >= b,
    '==': (a, b) => a === b, '!=': (a, b) => a !== b,
  };
  function parseCompare() {
    let left = parseValue();
    const links = [];
    while (compares[peek()]) {
      const compare = compares[tokens[next++].kind];
      const [a, b] = [left, parseValue()];
      if (a.type !== 'number' || b.type !== 'number') throw new FilterError('a comparison needs a number or a score on both sides');
      // A score that a head does not have satisfies no comparison.
      links.push((i) => { const [x, y] = [a.of(i), b.of(i)]; return isNumber(x) && isNumber(y) && compare(x, y); });
      left = b;
    }
    return links.length ? { type: 'truth', of: (i) => links.every((link) => link(i)) } : left;
  }
  function parseValue() {
    const token = tokens[next++];
    if (token?.kind === 'number') return { type: 'number', of: () => token.value };
    if (token?.kind === '-') {
      const inner = parseValue();
      if (inner.type !== 'number') throw new FilterError('a minus sign needs a number after it');
      return { type: 'number', of: (i) => -inner.of(i) };
    }
    if (token?.kind === 'name' && token.value === 'abs' && take('(')) {
      const inner = parseOr();
      if (inner.type !== 'number' || !take(')')) throw new FilterError('abs( … ) takes one number and a closing parenthesis');
      return { type: 'number', of: (i) => { const v = inner.of(i); return isNumber(v) ? Math.abs(v) : null; } };
    }
    if (token?.kind === 'name') return { type: 'number', of: resolve(token.value) };
    if (token?.kind === '(') {
      const inner = parseOr();
      if (!take(')')) throw new FilterError('a parenthesis is not closed');
      return inner;
    }
    throw new FilterError(`a score, a number or a parenthesis is missing before ${say(token)}`);
  }
  function truth(node) {
    if (node.type !== 'truth') throw new FilterError('write a comparison, such as layer > 5');
    return node;
  }

  if (!tokens.length) return null;
  const tree = truth(parseOr());
  if (next < tokens.length) throw new FilterError(`${say(tokens[next])} comes after the end of the expression: join parts with and, or`);
  return tree.of;
}

class FilterError extends Error {}
