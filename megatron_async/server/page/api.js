// The server's API: its key, requests, streams of events, and errors as sentences.

const PLACE = "megatron_async.key"; // of sessionStorage: this tab's, forgotten with it
let key = read();

function read() {
  try {
    return sessionStorage.getItem(PLACE) ?? "";
  } catch {
    return ""; // storage is switched off: the key lives as long as the page
  }
}

export function setKey(value) {
  key = value.trim();
  try {
    sessionStorage.setItem(PLACE, key);
  } catch { /* as above */ }
}

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const UNREACHABLE = "The server cannot be reached. Is it still running?";

// Ask the server; the answer, or an ApiError whose message is a sentence.
export async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE, 0);
  }
  if (!answer.ok) throw await errorOf(answer);
  return answer;
}

async function errorOf(answer) {
  let text = "";
  try {
    text = (await answer.json()).error?.message ?? "";
  } catch { /* no JSON: a proxy's page */ }
  return new ApiError(sentence(text || `The server answered with status ${answer.status}`), answer.status);
}

export function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}

// The events of a stream, decoded, without its mark of the end.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
        const event = JSON.parse(part.slice(6));
        if (event.error) throw new ApiError(sentence(event.error.message), 0);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the answer's end.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
