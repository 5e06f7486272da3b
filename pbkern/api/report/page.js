"use strict";

const REPORTS = JSON.parse(document.getElementById("contents").textContent);
const SVG = "http://www.w3.org/2000/svg";
// Part of the whole time that the timeline gives to an entry whose time nobody knows.
const UNKNOWN = 0.012;

/** An element with attributes and children; names with a capital S: of SVG. Texts are never read as HTML. */
function element(name, attributes = {}, ...children) {
  const node = name.startsWith("S:") ? document.createElementNS(SVG, name.slice(2)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null) continue;
    if (key === "onclick") node.addEventListener("click", value);
    else if (key === "style") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else node.setAttribute(key, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function figure(number, units, base = 1000) {
  let unit = 0;
  while (Math.abs(number) >= base && unit < units.length - 1) { number /= base; unit += 1; }
  const digits = number >= 100 || Number.isInteger(number) ? 0 : number >= 10 ? 1 : 2;
  return `${number.toFixed(digits)} ${units[unit]}`;
}
const time = (seconds) => figure(seconds * 1e6, ["us", "ms", "s"]);
const bytes = (count) => figure(count, ["B", "KB", "MB", "GB"]);
const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
const lastParts = (line) => line.split("/").slice(-2).join("/");
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

/** One report: its sections, and the selection that they share. */
class View {
  constructor(report) {
    this.report = report;
    this.stage = null;
    this.detail = element("div");
    this.root = element("div", { class: "report" },
      this.head(), this.timeline(), this.source(), this.kernels(), this.roofline(), this.refusals());
  }

  // ---------------------------------------------------------------- selection

  /** Marks kernels and lines, everywhere in the report. */
  choose(kernels, lines) {
    for (const node of this.root.querySelectorAll("[data-kernel], [data-line]")) {
      const chosen = node.dataset.kernel !== undefined
        ? kernels.includes(Number(node.dataset.kernel)) : lines.includes(node.dataset.line);
      node.classList.toggle("chosen", chosen);
      if (node.tagName === "BUTTON") node.setAttribute("aria-pressed", chosen);
    }
    this.showDetail(kernels);
  }

  chooseKernel(number) { this.choose([number], this.report.kernels[number].lines); }

  chooseLine(line) {
    const kernels = this.report.kernels.flatMap((kernel, n) => (kernel.lines.includes(line) ? [n] : []));
    this.choose(kernels, [line]);
  }

  // ---------------------------------------------------------------- sections

  head() {
    const { report } = this;
    const kinds = new Set(report.kernels.map((kernel) => (kernel.measured_seconds === null ? "predicted" : "measured")));
    const figures = [
      ["time, " + ([...kinds].join(" and ") || "no kernels"), time(report.seconds)],
      ["the machine's limit", time(report.limit_seconds)],
      ["of the limit reached", report.seconds ? percent(report.limit_seconds / report.seconds) : "-"],
      ["launches", String(report.launches)],
      ["bytes moved", bytes(report.bytes_moved)],
      ["peak of temporaries", bytes(report.peak_bytes)],
    ];
    const where = report.peak_at ? `Most temporaries are live at ${report.peak_at}. ` : "";
    const unknown = report.kernels.some((kernel) => kernel.launches === null) ? "Values decide how often some kernels run: they are counted once. " : "";
    return element("section", {},
      element("h1", {}, report.name),
      element("p", { class: "soft" }, `${report.target}: ${report.machine.cores} cores, ${report.machine.source}${report.machine_note && `; ${report.machine_note}`}`),
      element("div", { class: "figures" }, figures.map(([name, value]) => element("div", {}, element("b", {}, value), element("span", { class: "soft" }, name)))),
      element("p", {}, where + unknown),
      this.scopes(),
      report.planned_anew ? element("p", {}, `Planned anew in each process: ${report.planned_anew}`) : null);
  }

  /** Time by scope of jax.named_scope. */
  scopes() {
    const scopes = Object.entries(this.report.seconds_by_scope);
    if (!scopes.length || !this.report.seconds) return null;
    return element("div", { class: "scopes" }, scopes.flatMap(([scope, seconds]) => {
      const share = percent(seconds / this.report.seconds);
      return [element("span", {}, scope || "outside of scopes"), element("span", { class: "soft" }, `${time(seconds)}, ${share}`),
        element("div", { class: "bar" }, element("div", { style: { width: share.replace(" ", ""), background: "var(--arithmetic)" } }))];
    }));
  }

  timeline() {
    const { entries, spans } = this.report.timeline;
    const section = element("section", { class: "timeline" }, element("h2", {}, "Timeline, in order of launch"));
    if (!entries.length) return section;
    const times = entries.map((entry) => entry.kernel === null ? null
      : this.report.kernels[entry.kernel].seconds_of_one * (entry.runs === null ? 1 : entry.runs));
    const known = sum(times.filter((seconds) => seconds !== null)) || 1;
    const widths = times.map((seconds) => (seconds === null ? known * UNKNOWN : seconds));
    const total = sum(widths);
    const starts = widths.map((_, n) => sum(widths.slice(0, n)) / total);
    const place = (first, last) => ({ left: `${100 * starts[first]}%`, width: `${100 * (starts[last] + widths[last] / total - starts[first])}%` });
    for (let depth = 0; spans.some((span) => span.depth === depth); depth += 1) {
      section.append(element("div", { class: "span" }, spans.filter((span) => span.depth === depth)
        .map((span) => element("div", { style: place(span.first, span.last), title: span.label }, span.label))));
    }
    section.append(element("div", { class: "track" }, entries.map((entry, n) => this.bar(entry, place(n, n), times[n]))));
    section.append(element("p", { class: "soft" },
      element("span", { class: "key memory" }), "limit, bound by memory",
      element("span", { class: "key arithmetic" }), "limit, bound by arithmetic",
      element("span", { class: "key rest" }), "time beyond the limit",
      element("span", { class: "key other" }), "XLA or a copy, not timed"));
    const most = Math.max(...entries.map((entry) => entry.live_bytes));
    if (most) {
      const points = entries.map((entry, n) => {
        const height = 40 - 40 * entry.live_bytes / most;
        return `L${100 * starts[n]},${height} L${100 * (starts[n] + widths[n] / total)},${height}`;
      });
      section.append(
        element("S:svg", { class: "live", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": "live temporaries" },
          element("S:path", { d: `M0,40 ${points.join(" ")} L100,40 Z` })),
        element("p", { class: "soft" }, `live temporaries, at most ${bytes(most)}`));
    }
    return section;
  }

  bar(entry, style, seconds) {
    if (entry.kernel === null) {
      return element("button", { class: "other", style, title: `${entry.kind}: ${entry.name}`, disabled: "" });
    }
    const kernel = this.report.kernels[entry.kernel];
    const share = kernel.seconds_of_one ? kernel.limit_seconds / kernel.seconds_of_one : 1;
    const runs = entry.runs === 1 ? "" : entry.runs === null ? ", as often as values say" : `, ${entry.runs} times`;
    const title = `${entry.name}: ${time(seconds)}${runs}, ${percent(share)} of the limit, ${bytes(entry.live_bytes)} of temporaries live`;
    return element("button", { class: kernel.bound, style, title, "aria-label": title, "data-kernel": entry.kernel, onclick: () => this.chooseKernel(entry.kernel) },
      element("div", { class: "part", style: { width: `${Math.min(100, 100 * share)}%` } }));
  }

  source() {
    const { report } = this;
    const section = element("section", { class: "source" }, element("h2", {}, "Source, with time per line (forward and backward together)"));
    const box = element("div", { class: "scroll" });
    for (const { file, lines } of report.sources) {
      let before = lines.length ? lines[0].number : 0;
      box.append(element("p", { class: "file soft" }, file));
      box.append(element("ol", { class: "code" }, lines.map(({ number, text }) => {
        const gap = number > before + 1;
        before = number;
        return this.sourceLine(file, number, text, gap);
      })));
    }
    const elsewhere = Object.entries(report.seconds_by_line).filter(([line]) => !/:\d+$/.test(line));
    for (const [line, seconds] of elsewhere) box.append(element("p", { class: "soft" }, `${time(seconds)} at ${line}`));
    section.append(box);
    return section;
  }

  sourceLine(file, number, text, gap) {
    const line = `${file}:${number}`;
    const seconds = this.report.seconds_by_line[line];
    const share = seconds && this.report.seconds ? seconds / this.report.seconds : 0;
    const cells = [
      element("span", { class: "heat", style: { "--share": `${100 * share}%` } }, share ? percent(share) : ""),
      element("span", { class: "soft" }, seconds === undefined ? "" : time(seconds)),
      element("span", { class: "soft" }, gap ? `\u22ee ${number}` : String(number)), element("span", {}, text),
    ];
    const attributes = seconds === undefined ? { disabled: "" } : { onclick: () => this.chooseLine(line) };
    return element("li", { "data-line": seconds === undefined ? undefined : line }, element("button", attributes, cells));
  }

  kernels() {
    const { report } = this;
    const order = report.kernels.map((_, n) => n).sort((a, b) => report.kernels[b].seconds - report.kernels[a].seconds);
    const head = [["kernel"], ["runs", "number"], ["time", "number"], ["of all"], ["of limit", "number"], ["bound by"], ["moved", "number"]];
    return element("section", { class: "kernels" }, element("h2", {}, `Kernels (${report.kernels.length} different)`),
      element("div", { class: "scroll" }, element("table", {},
        element("thead", {}, element("tr", {}, head.map(([name, kind]) => element("th", { class: kind }, name)))),
        element("tbody", {}, order.map((n) => this.kernelRow(n))))),
      this.detail);
  }

  kernelRow(n) {
    const kernel = this.report.kernels[n];
    const one = kernel.launches === null ? "by values" : kernel.launches;
    const runs = kernel.equal.length > 1 ? `${kernel.equal.length} x ${one}` : String(one);
    const share = this.report.seconds ? kernel.seconds / this.report.seconds : 0;
    return element("tr", { "data-kernel": n },
      element("td", {}, element("button", { onclick: () => this.chooseKernel(n) }, kernel.name)),
      element("td", { class: "number" }, runs),
      element("td", { class: "number" }, time(kernel.seconds)),
      element("td", {}, element("div", { class: "bar" }, element("div", { style: { width: `${100 * share}%`, background: `var(--${kernel.bound})` } }))),
      element("td", { class: "number" }, kernel.seconds_of_one ? percent(kernel.limit_seconds / kernel.seconds_of_one) : "-"),
      element("td", {}, kernel.instructions.length ? `${kernel.bound}, ${kernel.instructions.join(", ")}` : kernel.bound),
      element("td", { class: "number" }, bytes(kernel.bytes_moved)));
  }

  /** The kernels that are chosen: operations by place, and the first one's code in tabs. */
  showDetail(kernels) {
    this.detail.replaceChildren();
    if (!kernels.length) return;
    const kernel = this.report.kernels[kernels[0]];
    const places = new Map();
    for (const { primitive, at, context } of kernel.operations) {
      const place = [at || "unknown line", context].filter(Boolean).join(", ");
      places.set(place, [...(places.get(place) || []), primitive]);
    }
    const more = kernels.length > 1 ? `, the first of ${kernels.length} kernels with this line` : "";
    const equal = kernel.equal.length > 1 ? `, equal to ${kernel.equal.slice(1).join(", ")}` : "";
    this.detail.append(
      element("h2", { style: { "margin-top": "14px" } }, kernel.name + more),
      element("p", { class: "soft" }, `grid [${kernel.grid.join(", ")}], ${figure(kernel.flops, ["flop", "Kflop", "Mflop", "Gflop"])}, recompute x${kernel.recompute.toFixed(2)}${equal}`),
      element("ul", { class: "plain" }, [...places].map(([place, operations]) => element("li", {}, `${operations.join(", ")} at ${place}`))));
    const stages = Object.keys(kernel.texts);
    if (!stages.length) return;
    const shown = stages.includes(this.stage) ? this.stage : stages[0];
    const text = element("pre", {}, kernel.texts[shown]);
    const tabs = stages.map((stage) => element("button", { role: "tab", "aria-selected": stage === shown, onclick: (event) => {
      this.stage = stage;
      text.textContent = kernel.texts[stage];
      for (const tab of tabs) tab.setAttribute("aria-selected", tab === event.currentTarget);
    } }, stage));
    this.detail.append(element("div", { class: "tabs", role: "tablist" }, tabs), element("div", { class: "scroll" }, text));
  }

  roofline() {
    const { report } = this;
    const section = element("section", { class: "roofline" }, element("h2", {}, "Roofline"));
    const points = report.kernels.flatMap((kernel, n) => kernel.flops && kernel.bytes_moved && kernel.seconds_of_one
      ? [{ n, kernel, x: kernel.flops / kernel.bytes_moved, y: kernel.flops / kernel.seconds_of_one }] : []);
    if (!points.length) return element("section", { class: "roofline" }, element("h2", {}, "Roofline"), element("p", { class: "soft" }, "No kernel computes and moves memory."));
    const { flops, bandwidth } = report.machine;
    const ridge = flops / bandwidth;
    const low = Math.floor(Math.log10(Math.min(ridge, ...points.map((point) => point.x))) - 0.3);
    const high = Math.ceil(Math.log10(Math.max(ridge, ...points.map((point) => point.x))) + 0.3);
    const top = Math.ceil(Math.log10(Math.max(flops, ...points.map((point) => point.y))));
    const bottom = Math.floor(Math.log10(Math.min(...points.map((point) => point.y), bandwidth * 10 ** low)));
    const [width, height, left, right, below] = [640, 330, 64, 24, 36];
    const across = (x) => left + (width - left - right) * (Math.log10(x) - low) / (high - low);
    const up = (y) => 10 + (height - below - 10) * (top - Math.log10(y)) / (top - bottom);
    const picture = element("S:svg", { class: "roof", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "roofline of the kernels" });
    for (let power = low; power <= high; power += 1) {
      const x = across(10 ** power);
      picture.append(element("S:line", { class: "grid", x1: x, x2: x, y1: 10, y2: height - below }), element("S:text", { x, y: height - below + 14, "text-anchor": "middle" }, String(10 ** power)));
    }
    for (let power = bottom; power <= top; power += 1) {
      const y = up(10 ** power);
      picture.append(element("S:line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }), element("S:text", { x: left - 6, y: y + 4, "text-anchor": "end" }, figure(10 ** power, ["", "K", "M", "G", "T", "P"])));
    }
    const slope = (x) => Math.min(flops, bandwidth * x);
    picture.append(
      element("S:path", { class: "limit", d: `M${across(10 ** low)},${up(slope(10 ** low))} L${across(ridge)},${up(flops)} L${across(10 ** high)},${up(flops)}` }),
      element("S:text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "operations per byte moved"),
      element("S:text", { x: left, y: 8 }, "operations per second"));
    const longest = Math.max(...points.map((point) => point.kernel.seconds)) || 1;
    for (const { n, kernel, x, y } of points.sort((a, b) => b.kernel.seconds - a.kernel.seconds)) {
      const radius = 3 + 11 * Math.sqrt(kernel.seconds / longest);
      picture.append(element("S:circle", { class: kernel.bound, cx: across(x), cy: up(y), r: radius, "data-kernel": n, onclick: () => this.chooseKernel(n) },
        element("S:title", {}, `${kernel.name}: ${figure(y, ["", "K", "M", "G", "T"])}flop/s, ${x.toFixed(2)} operations per byte`)));
    }
    section.append(picture, element("p", { class: "soft" }, `The line: ${figure(bandwidth, ["B", "KB", "MB", "GB", "TB"])}/s of memory and ${figure(flops, ["", "K", "M", "G", "T"])}flop/s in float32. Kernels whose arrays stay in a cache, and those of narrower types, can be above it. A circle's area is the kernel's time.`));
    return section;
  }

  refusals() {
    const { report } = this;
    const refused = [...report.not_fused].sort((a, b) => b.bytes - a.bytes);
    const item = (text) => element("li", {}, text);
    return element("section", { class: "refusals" }, element("h2", {}, `Not fused (${refused.length})`),
      element("ul", { class: "plain scroll" }, refused.map(({ operation, at, why, times, bytes: saved }) =>
        item(`${times > 1 ? `${times} x ` : ""}${operation} at ${at || "unknown line"}: ${why}; would save ${bytes(saved)}`))),
      report.left_to_xla.length ? element("h2", { style: { "margin-top": "12px" } }, `Left to XLA (${report.left_to_xla.length})`) : null,
      element("ul", { class: "plain scroll" }, report.left_to_xla.map(({ operation, at, why }) => item(`${operation} at ${at || "unknown line"}: ${why}`))),
      report.written.length ? element("h2", { style: { "margin-top": "12px" } }, `Written by hand (${report.written.length})`) : null,
      element("ul", { class: "plain scroll" }, report.written.map(({ name, origin, at }) => item(`${name} (${origin}) at ${at || "unknown line"}`))));
  }
}

/** Figures of two reports with their ratios. */
function comparison([first, second]) {
  const rows = [["time", "seconds", time], ["the machine's limit", "limit_seconds", time], ["launches", "launches", String],
    ["bytes moved", "bytes_moved", bytes], ["peak of temporaries", "peak_bytes", bytes]];
  return element("section", { class: "comparison" }, element("h2", {}, `${first.name} beside ${second.name}`),
    element("table", {},
      element("thead", {}, element("tr", {}, ["", first.name, second.name, "ratio"].map((name) => element("th", {}, name)))),
      element("tbody", {}, rows.map(([name, key, shown]) => element("tr", {}, [name, shown(first[key]), shown(second[key]),
        first[key] ? (second[key] / first[key]).toFixed(2) : "-"].map((cell) => element("td", {}, cell)))))));
}

/** Graphs of a function: figures of their parts, whose reports follow, and what is not compiled. */
function overview({ name, notes, graphs }) {
  const head = [["graph"], ["part"], ["time", "number"], ["kernels", "number"], ["launches", "number"], ["left to XLA", "number"]];
  const rows = graphs.flatMap((graph) => {
    const title = `graph ${graph.number}, ${graph.kind}`;
    if (!graph.parts.length) return [[title, "runs in Torch", "-", "-", "-", "-"]];
    return graph.parts.map((number, n) => {
      const part = REPORTS[number];
      const kernels = sum(part.kernels.map((kernel) => kernel.equal.length)) + part.written.length;
      return [n ? "" : title, element("a", { href: `#report-${number}` }, part.name), time(part.seconds), String(kernels), String(part.launches), String(part.left_to_xla.length)];
    });
  });
  const all = sum(REPORTS.map((part) => part.seconds));
  return element("section", { class: "overview" }, element("h1", {}, name),
    element("p", {}, `${graphs.length} graph(s), ${time(all)} in all kernels of their parts. `, notes.join(". ")),
    element("div", { class: "scroll" }, element("table", {},
      element("thead", {}, element("tr", {}, head.map(([title, kind]) => element("th", { class: kind }, title)))),
      element("tbody", {}, rows.map((cells) => element("tr", {}, cells.map((cell, n) => element("td", { class: head[n][1] }, cell))))))),
    graphs.filter((graph) => graph.in_torch.length).map((graph) => [
      element("h2", { style: { "margin-top": "12px" } }, `Graph ${graph.number}, ${graph.kind}: run in Torch (${graph.in_torch.length})`),
      element("ul", { class: "plain scroll" }, graph.in_torch.map((what) => element("li", {}, what)))]).flat());
}

const main = document.querySelector("main");
const graphs = document.getElementById("graphs");
const beside = !graphs && REPORTS.length > 1;
if (graphs) main.append(overview(JSON.parse(graphs.textContent)));
if (beside) main.append(comparison(REPORTS));
main.append(element("div", { class: beside ? "reports two" : "reports" }, REPORTS.map((report, n) => {
  const { root } = new View(report);
  root.id = `report-${n}`;
  return root;
})));
