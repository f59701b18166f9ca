// Functions that tests call in the status page; added to the page before its own script.
window.probe = {
  // Returns the shown texts, and the raw values behind them.
  gather() {
    const at = id => document.getElementById(id), raw = {}, misses = {};
    for (const node of document.querySelectorAll("[data-field]"))
      raw[node.dataset.field] = node.dataset.raw;
    for (const node of document.querySelectorAll("[data-miss]"))
      misses[node.dataset.miss] = Number(node.dataset.raw);
    const cells = row => [...row.children].map(c => [c.textContent, c.dataset.raw ?? null]);
    const rows = id => [...document.querySelectorAll(`#${id} tbody tr`)].map(cells);
    const tables = ["tiers", "engines", "sessions", "spaces", "sizes", "sparse"];
    return {
      shown: Number(document.body.dataset.shown),
      raw,
      misses,
      rate: at("rate-hour").dataset.raw,
      prompts: at("rate-hour-note").dataset.raw,
      rateText: at("rate-hour").textContent,
      saved: at("saved-hour").dataset.raw,
      loaded: at("moved-hour").dataset.raw,
      stored: at("moved-hour-note").dataset.raw,
      state: at("state").textContent,
      host: at("host").textContent,
      ...Object.fromEntries(tables.map(id => [id, rows(id)])),
    };
  },
  // Returns the element in focus, its name for a screen reader, and whether the focus can be seen.
  focused() {
    const one = document.activeElement;
    const outlined = getComputedStyle(one.type === "radio" ? one.nextElementSibling : one);
    const label = one.labels && one.labels.length ? one.labels[0].textContent : "";
    return {
      id: one.id,
      tag: one.tagName,
      name: (one.getAttribute("aria-label") || label || one.textContent.trim()).slice(0, 60),
      outline: outlined.outlineStyle,
      width: parseFloat(outlined.outlineWidth),
    };
  },
  // Returns the texts with less contrast than WCAG's 4.5 to 1.
  poor() {
    const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const numbers = colour => colour.match(/[0-9.]+/g).map(Number);
    const bright = colour => {
      const [red, green, blue] = numbers(colour);
      return 0.2126 * part(red) + 0.7152 * part(green) + 0.0722 * part(blue);
    };
    const behind = node => {
      for (; node; node = node.parentElement) {
        const colour = getComputedStyle(node).backgroundColor;
        if (numbers(colour)[3] !== 0) return colour;
      }
      return "rgb(255, 255, 255)";
    };
    const texts = "h1, h2, h3, p, td, th, dt, dd, button, .pill, .value, .key, .seg label";
    const found = [];
    for (const node of document.querySelectorAll(texts)) {
      if (!node.offsetParent || !node.textContent.trim()) continue;
      const a = bright(getComputedStyle(node).color), b = bright(behind(node));
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const name = `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`;
      if (ratio < 4.5) found.push(`${name}: ${ratio.toFixed(2)}`);
    }
    return found;
  },
};
