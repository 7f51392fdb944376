// The form of an answer's text: what its marks mean, shown by elements, and never by HTML.
//
// The text stays whole in the document: marks are hidden, not removed, so that each character has
// its place and belongs to its token. Blocks: paragraphs, headings, lists, quotes, fenced code.
// In a line: `code`, **bold**, *italic*. All else, links too, is shown as it was written.

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(?=\S)/;
const ITEM = /^([ \t]*)(?:([-*+])|(\d{1,9})[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}>[ \t]?/;
const DEEPEST = 6; // lists in one another, and bold in italic in bold

// The blocks of a text: where each begins and ends, its kind, and its lines as [begin, end] pairs,
// the ends without the newline.
export function blocks(text, from = 0) {
  const found = [];
  let open = null; // a fence's mark, until the line that closes it
  for (let begin = from; begin < text.length;) {
    const newline = text.indexOf("\n", begin);
    const end = newline < 0 ? text.length : newline;
    const next = newline < 0 ? end : newline + 1;
    const line = text.slice(begin, end);
    const last = found.at(-1);
    const fence = FENCE.exec(line)?.[1];
    if (open) {
      if (fence && fence[0] === open[0] && fence.length >= open.length && !line.trim().slice(fence.length)) {
        open = null;
        last.closed = begin;
      } else last.lines.push([begin, end]);
    } else if (fence) {
      open = fence;
      found.push({ kind: "code", begin, lines: [], first: next, closed: null });
    } else {
      const kind = kindOf(line, last);
      if (last?.kind === kind && kind !== "heading") last.lines.push([begin, end]);
      else found.push({ kind, begin, lines: [[begin, end]] });
    }
    found.at(-1).end = next;
    begin = next;
  }
  return found;
}

function kindOf(line, last) {
  if (!line.trim()) return "blank";
  if (HEADING.test(line)) return "heading";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  if (last?.kind === "list" && /^[ \t]/.test(line)) return "list"; // an item's further line
  return "paragraph";
}

// Draw one block into an element. `put(parent, begin, end)` appends the text of a place.
export function draw(block, text, put) {
  if (block.kind === "code") return code(block, text, put);
  if (block.kind === "blank") return hidden(put, block.begin, block.end);
  if (block.kind === "list") return list(block, text, put);
  const size = block.kind === "heading" ? HEADING.exec(text.slice(block.begin, block.end))[1].length : 0;
  const box = made(size ? `h${Math.min(size + 2, 6)}` : "div", block.kind);
  block.lines.forEach(([begin, end], i) => {
    const line = text.slice(begin, end);
    const mark = { heading: HEADING, quote: QUOTE }[block.kind]?.exec(line)?.[0].length ?? 0;
    if (mark) box.append(hidden(put, begin, begin + mark));
    inline(box, text, begin + mark, end, put);
    const after = block.lines[i + 1]?.[0] ?? block.end;
    if (after > end) i + 1 < block.lines.length ? put(box, end, after) : box.append(hidden(put, end, after));
  });
  return box;
}

function code(block, text, put) {
  const box = made("pre", "code");
  const inside = made("code");
  const end = block.closed ?? block.end;
  box.append(hidden(put, block.begin, block.first), inside);
  put(inside, block.first, end);
  if (end < block.end) box.append(hidden(put, end, block.end));
  return box;
}

function list(block, text, put) {
  const root = made("div", "list");
  const open = []; // lists in one another: their elements and indents
  let item = null;
  for (const [i, [begin, end]] of block.lines.entries()) {
    const found = ITEM.exec(text.slice(begin, end));
    let at = begin;
    if (found) {
      const indent = found[1].replaceAll("\t", "    ").length;
      while (open.length > 1 && indent < open.at(-1).indent) open.pop();
      if (!open.length || (indent > open.at(-1).indent + 1 && open.length < DEEPEST)) {
        const inner = made(found[3] ? "ol" : "ul");
        (item ?? root).append(inner);
        open.push({ box: inner, indent });
      }
      item = made("li");
      if (found[3]) item.value = Number(found[3]);
      open.at(-1).box.append(item);
      at = begin + found[0].length;
      item.append(hidden(put, begin, at));
    }
    inline(item, text, at, end, put);
    const after = block.lines[i + 1]?.[0] ?? block.end;
    const goesOn = i + 1 < block.lines.length && !ITEM.test(text.slice(...block.lines[i + 1]));
    if (after > end) goesOn ? put(item, end, after) : item.append(hidden(put, end, after));
  }
  return root;
}

// The marks within a line.
function inline(parent, text, begin, end, put, depth = 0) {
  let from = begin; // of what is not shown yet
  for (let at = begin; at < end; at++) {
    const mark = markAt(text, at, begin);
    if (!mark) continue;
    const close = depth < DEEPEST ? closing(text, at + mark.length, end, mark) : -1;
    if (close < 0) {
      at += mark.length - 1;
      continue;
    }
    if (from < at) put(parent, from, at);
    const kind = mark[0] === "`" ? "code" : mark.length === 2 ? "strong" : "em";
    const box = made(kind);
    parent.append(hidden(put, at, at + mark.length), box);
    if (kind === "code") put(box, at + mark.length, close);
    else inline(box, text, at + mark.length, close, put, depth + 1);
    parent.append(hidden(put, close, close + mark.length));
    from = close + mark.length;
    at = from - 1;
  }
  if (from < end) put(parent, from, end);
}

function markAt(text, at, begin) {
  const sign = text[at];
  if (sign !== "`" && sign !== "*" && sign !== "_") return "";
  let run = 1;
  while (text[at + run] === sign) run++;
  if (sign === "`") return text.slice(at, at + run);
  const opens = run < 3 && /\S/.test(text[at + run] ?? " ");
  const isInWord = sign === "_" && at > begin && /\w/.test(text[at - 1]);
  return opens && !isInWord ? text.slice(at, at + run) : "";
}

// Where the mark stands again, so that it closes; -1: nowhere.
function closing(text, from, end, mark) {
  for (let at = text.indexOf(mark, from); at >= 0 && at + mark.length <= end;) {
    let run = 0;
    while (text[at + run] === mark[0]) run++;
    const closes = mark[0] === "`" || (/\S/.test(text[at - 1]) && !(mark[0] === "_" && /\w/.test(text[at + run] ?? " ")));
    if (run === mark.length && at > from && closes) return at;
    at = text.indexOf(mark, at + run);
  }
  return -1;
}

function hidden(put, begin, end) {
  const box = made("span", "mark");
  put(box, begin, end);
  return box;
}

function made(name, className) {
  const element = document.createElement(name);
  if (className) element.className = className;
  return element;
}
