// An answer's text as tokens, each with what it might have been.

const tip = document.getElementById("tip");
const LEVELS = [0.9, 0.6, 0.3, 0.1]; // probabilities below which a token is shaded more

export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Puts tokens into an element as their text becomes certain.
export class TokenText {
  constructor(parent) {
    this.parent = parent;
    this.decoder = new TextDecoder(); // a character may be several tokens
    this.waiting = []; // tokens whose text the server has not told yet
    this.text = ""; // told, and not shown yet
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
    this.show();
  }

  // Show what is left: text of no token that is known.
  end() {
    this.waiting = [];
    if (this.text) this.parent.append(this.text);
    this.text = "";
  }

  show() {
    while (this.waiting.length && this.text) {
      const [piece, entry] = this.waiting[0];
      if (piece && !this.text.startsWith(piece)) {
        if (piece.startsWith(this.text)) return; // the rest of its text comes later
        this.waiting.shift(); // a special token, which has no text
        continue;
      }
      this.waiting.shift();
      if (!piece) continue; // the beginning of a character
      const span = element("span", `token p${LEVELS.filter((level) => Math.exp(entry.logprob) < level).length}`, piece);
      span.entry = entry;
      this.parent.append(span);
      this.text = this.text.slice(piece.length);
    }
  }

  over(target) {
    if (target.entry) showTip(target);
    else hideTip();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.at(null);
    if (!step) return;
    const tokens = [...this.parent.querySelectorAll(".token")];
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
