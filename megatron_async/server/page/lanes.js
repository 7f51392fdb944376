// Steps as a picture: a CPU lane over a device lane, and the gaps between the device's steps. The
// profile page (megatron_async/lab) holds a copy of this file. A span is
// [lane (0: CPU, 1: device), name, step, start, length], microseconds.

const SPACE = "http://www.w3.org/2000/svg";
const STAGES = {
  prepare_step: "prepare", transfer_bookkeeping_to_gpu: "upload", launch_step: "launch",
  resolve: "wait", update_requests: "book", emit: "emit",
};
const HEIGHT = 156, LEFT = 52, RIGHT = 8;
const CALL_Y = 2, CPU_Y = 10, DEVICE_Y = 62, LANE = 36, AXIS_Y = 130;
const LETTER = 6.2; // width of a letter, roughly
const STEPS = 6; // shown, of those that were told
const FEW = 3; // a picture of fewer steps does not take the place of another

export function svg(name, attributes, text) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// A picture of told spans, so many pixels wide; null where there are no steps in them, or too few
// of them to take the place of another picture.
export function lanesPicture({ spans, reasons }, width, isFirst) {
  const device = spans.filter((span) => span[0] === 1).sort((a, b) => a[3] - b[3]).slice(-STEPS);
  if (device.length < (isFirst ? 1 : FEW)) return null;
  const steps = new Set(device.map((span) => span[2]));
  const cpu = spans.filter((span) => span[0] === 0 && STAGES[span[1]]);
  // From where the CPU began with the first step to the end of the last.
  const own = cpu.filter((span) => steps.has(span[2]));
  const start = Math.min(device[0][3], ...own.map((span) => span[3]).filter((at) => at > device[0][3] - device[0][4]));
  const end = Math.max(...device.map((span) => span[3] + span[4]));
  return draw(cpu, device, new Map(reasons), start, Math.max(end, start + 1), width);
}

// A picture of a window, with the gaps' lengths, and calls of `step` as thin bars above the lanes.
export function windowPicture({ spans, start, end }, width) {
  const device = spans.filter((span) => span[0] === 1), own = spans.filter((span) => span[0] === 0);
  const calls = own.filter((span) => span[1] === "step");
  return draw(own.filter((span) => STAGES[span[1]]), device, new Map(), start, end, width, calls);
}

function draw(cpu, device, reasons, start, end, width, calls) {
  const scale = (width - LEFT - RIGHT) / (end - start);
  const x = (at) => LEFT + (Math.min(Math.max(at, start), end) - start) * scale;
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `CPU and device over ${duration(end - start)}` });
  for (const [y, name] of [[CPU_Y, "CPU"], [DEVICE_Y, "device"]]) {
    root.append(svg("rect", { class: "lane", x: LEFT, y, width: width - LEFT - RIGHT, height: LANE, rx: 3 }));
    root.append(svg("text", { class: "lane-name", x: 0, y: y + LANE / 2 + 4 }, name));
  }
  const bar = (span, y, kind, names, onBar, height = LANE) => {
    const left = x(span[3]), right = x(span[3] + span[4]);
    if (span[3] + span[4] <= start || span[3] >= end) return;
    const box = svg("rect", { class: `bar fill-${kind}`, x: left, y, width: Math.max(right - left, 1), height });
    box.append(svg("title", {}, `${names[0]}: ${duration(span[4])}, from ${duration(Math.max(span[3] - start, 0))}`));
    root.append(box);
    const name = names.find((one) => one.length * LETTER + 6 <= right - left);
    if (name && onBar) root.append(svg("text", { class: onBar, x: (left + right) / 2, y: y + LANE / 2 + 4 }, name));
  };
  device.forEach((span, place) => {
    const before = device[place - 1];
    if (before) gap(root, x, before[3] + before[4], span[3], calls);
    if (reasons.has(span[2])) {
      const at = Math.max(x(span[3]), LEFT + 4);
      root.append(svg("text", { class: "why", x: at, y: DEVICE_Y + LANE + 16 }, `\u25b4 not launched ahead: ${reasons.get(span[2]).replaceAll("_", " ")}`));
    }
    bar(span, DEVICE_Y, `device-${span[2] % 2}`, [`step ${span[2]}`, String(span[2])], "on-bar");
  });
  for (const span of calls ?? []) bar(span, CALL_Y, "call", [`step ${span[2]}`], null, CPU_Y - CALL_Y - 3);
  for (const span of cpu) {
    const stage = STAGES[span[1]];
    bar(span, CPU_Y, stage, [`${stage} ${span[2]}`, stage], stage === "wait" ? "on-wait" : "on-bar");
  }
  for (const share of width < 480 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]) {
    const at = LEFT + share * (width - LEFT - RIGHT);
    root.append(svg("path", { class: "grid", d: `M${at} ${AXIS_Y - 6}V${AXIS_Y}` }));
    const kind = share === 1 ? "tick-end" : "tick";
    root.append(svg("text", { class: kind, x: at, y: AXIS_Y + 14 }, share ? duration(share * (end - start)) : "0"));
  }
  return root;
}

function gap(root, x, from, to, isNamed) {
  const left = x(from), right = x(to);
  if (to <= from || right - left < 0.5) return;
  const box = svg("rect", { class: "fill-gap", x: left, y: CPU_Y, width: right - left, height: DEVICE_Y + LANE - CPU_Y });
  box.append(svg("title", {}, `device idle for ${duration(to - from)}`));
  root.append(box);
  root.append(svg("path", { class: "gap-edge", d: `M${left} ${DEVICE_Y + LANE + 4}H${right}` }));
  if (!isNamed || right - left < 24) return;
  const name = `idle ${duration(to - from)}`, end = root.viewBox.baseVal.width;
  const middle = Math.min(Math.max((left + right) / 2, LEFT), end - name.length * LETTER / 2);
  root.append(svg("text", { class: "gap-length", x: middle, y: DEVICE_Y + LANE + 17 }, name));
}

// Share of the time between the first and the last told step in which the device had none.
export function idleShare(spans) {
  const device = spans.filter((span) => span[0] === 1).sort((a, b) => a[3] - b[3]);
  if (device.length < 3) return null;
  let busyUntil = device[0][3], idle = 0;
  for (const [, , , start, length] of device) {
    idle += Math.max(start - busyUntil, 0);
    busyUntil = Math.max(busyUntil, start + length);
  }
  return idle / Math.max(busyUntil - device[0][3], 1);
}

export function duration(us) {
  if (us < 1000) return `${us.toFixed(us < 10 ? 1 : 0)} \u00b5s`;
  const ms = us / 1000;
  return ms < 1000 ? `${ms.toFixed(ms < 10 ? 2 : 1)} ms` : `${(ms / 1000).toFixed(2)} s`;
}
