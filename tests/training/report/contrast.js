// The words of the page whose contrast with what is behind them is below 4.5.
(() => {
  const parse = (text) => {
    const found = text.match(/[\d.]+/g).map(Number);
    return found.length < 4 ? [...found, 1] : found;
  };
  const luminance = (colour) => {
    const [red, green, blue] = colour.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const style = getComputedStyle(each), colour = parse(style.backgroundColor);
      if (style.backgroundImage !== "none") return null;
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const low = [], silent = ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element), words = node.textContent.trim();
    if (!words || silent.includes(element.tagName) || !element.getClientRects().length || element.style.fill) continue;
    const ground = behind(element.ownerSVGElement || element);
    const ink = parse(element.ownerSVGElement ? style.fill : style.color);
    if (!ground || ink[3] === 0) continue;
    const [dark, light] = [luminance(ink), luminance(ground)].sort((one, other) => one - other);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 4.5) low.push(`${words.slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return low;
})()
