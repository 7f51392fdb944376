// An answer's text as tokens, each with what it might have been.

import { blocks, draw } from "./markdown.js";

const tip = document.getElementById("tip");
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // probabilities below which a token is shaded more

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Puts tokens into an element as their text becomes certain, in the form that the text's marks give.
export class TokenText {
  constructor(parent) {
    this.parent = parent;
    this.decoder = new TextDecoder(); // a character may be several tokens
    this.waiting = []; // tokens whose text the server has not told yet
    this.text = ""; // told, and not certain yet
    this.whole = ""; // certain
    this.tokens = []; // of `whole`: where each begins and ends, and what else it might have been
    this.kept = 0; // where the last block begins: blocks before it stay as they are drawn
    this.last = []; // elements of the last blocks
    this.frame = 0;
    parent.tabIndex = 0;
    parent.addEventListener("pointerover", (event) => this.over(event.target));
    parent.addEventListener("pointerleave", () => hideTip());
    parent.addEventListener("keydown", (event) => this.key(event));
    parent.addEventListener("blur", () => this.at(null));
  }

  // Take an event's text and its tokens' log probs.
  push(text, logProbs) {
    this.text += text;
    for (const entry of logProbs) {
      const bytes = entry.bytes ? Uint8Array.from(entry.bytes) : new TextEncoder().encode(entry.token);
      this.waiting.push([this.decoder.decode(bytes, { stream: true }), entry]);
    }
    this.settle();
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  // Show a text whose tokens are not known.
  say(text) {
    this.text = text;
    this.end();
  }

  // Show what is left: text of no token that is known.
  end() {
    this.waiting = [];
    this.take(this.text);
    this.text = "";
    this.draw();
  }

  settle() {
    while (this.waiting.length && this.text) {
      const [piece, entry] = this.waiting[0];
      if (piece && !this.text.startsWith(piece)) {
        if (piece.startsWith(this.text)) return; // the rest of its text comes later
        this.waiting.shift(); // a special token, which has no text
        continue;
      }
      this.waiting.shift();
      if (!piece) continue; // the beginning of a character
      this.take(piece, entry);
      this.text = this.text.slice(piece.length);
    }
  }

  take(piece, entry) {
    if (!piece) return;
    const begin = this.whole.length;
    this.whole += piece;
    this.tokens.push({ begin, end: this.whole.length, entry });
  }

  // Draw the last block again, which may have become another, and what comes after it.
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const found = blocks(this.whole, this.kept);
    for (const element of this.last) element.remove();
    const drawn = found.map((block) => draw(block, this.whole, (parent, begin, end) => this.put(parent, begin, end)));
    this.parent.append(...drawn);
    // What follows a blank line cannot change what is before it, but for the open end of a list.
    const stays = found.findLastIndex((block) => block.kind === "blank");
    const whole = stays > 0 && found.length > stays + 1 ? stays + 1 : 0;
    this.kept = whole ? found[whole].begin : this.kept;
    this.last = drawn.slice(whole);
    if (this.here && !this.here.isConnected) this.at(null);
  }

  // Append the text of a place, as elements of its tokens.
  put(parent, begin, end) {
    let place = this.first(begin);
    for (; place < this.tokens.length && this.tokens[place].begin < end; place++) {
      const token = this.tokens[place];
      const piece = this.whole.slice(Math.max(begin, token.begin), Math.min(end, token.end));
      if (!token.entry) {
        parent.append(piece);
        continue;
      }
      const level = LEVELS.filter((one) => Math.exp(token.entry.logprob) < one).length;
      const span = element("span", `token p${level}`, piece);
      span.entry = token.entry;
      parent.append(span);
    }
  }

  // The first token that ends behind a place.
  first(place) {
    let [low, high] = [0, this.tokens.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tokens[middle].end > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  over(target) {
    if (target.entry) showTip(target);
    else hideTip();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape" && this.here) {
      event.stopPropagation(); // it ends the look at a token, and not the answer
      this.at(null);
    }
    if (!step) return;
    const tokens = [...this.parent.querySelectorAll(".token")].filter((token) => token.getClientRects().length);
    const place = tokens.indexOf(this.here) + (this.here ? step : step > 0 ? 1 : 0);
    this.at(tokens[Math.max(0, Math.min(place, tokens.length - 1))] ?? null);
    event.preventDefault();
  }

  at(token) {
    this.here?.classList.remove("here");
    this.here = token;
    if (!token) return hideTip();
    token.classList.add("here");
    token.scrollIntoView({ block: "nearest" });
    showTip(token);
  }
}

export function hideTip() {
  tip.hidden = true;
}

function showTip(token) {
  const { entry } = token;
  const likely = entry.top_logprobs.map((other) => line(other, same(other, entry)));
  const isThere = entry.top_logprobs.some((other) => same(other, entry));
  tip.replaceChildren(...likely, ...(isThere ? [] : [line(entry, true)]));
  tip.hidden = false;
  const box = token.getClientRects()[0];
  const { width, height } = tip.getBoundingClientRect();
  const above = box.top - height - 6;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - width - 8))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 6}px`;
}

function same(one, other) {
  return one.token === other.token && String(one.bytes) === String(other.bytes);
}

function line({ token, logprob }, isChosen) {
  const share = Math.exp(logprob);
  const row = element("div", isChosen ? "line chosen" : "line");
  const bar = element("span", "share");
  const filled = element("i");
  filled.style.width = `${(100 * share).toFixed(1)}%`;
  bar.append(filled);
  row.append(element("code", "", shown(token)), bar, element("span", "number", percent(share)));
  return row;
}

function shown(token) {
  return token.replaceAll(" ", "\u00b7").replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5") || "(nothing)";
}

function percent(share) {
  if (share < 0.001) return "<0.1 %";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}
