// Measures a page on the screen, for test_report_in_browser.py.

// Elements that reach beyond the window, or names beyond their place; not what a chart cuts off at its edge.
function tooWide() {
  const wide = [...document.querySelectorAll("body *")].filter((element) => {
    if (element.ownerSVGElement || element.closest(".signs, [hidden]")) return false;
    const box = element.getBoundingClientRect();
    return box.right > innerWidth + 0.5 || box.left < -0.5;
  });
  const found = wide.map((element) => `${element.tagName}.${element.getAttribute("class")}`);
  for (const name of document.querySelectorAll(".names text"))
    if (name.getBoundingClientRect().left < name.ownerSVGElement.getBoundingClientRect().left - 0.5)
      found.push(`the name ${name.textContent}`);
  if (document.documentElement.scrollWidth > innerWidth) found.push("the page scrolls sideways");
  return found;
}

function texts() {
  return [...document.querySelectorAll("body *")].filter((element) => {
    if (element.closest("script, style, title, defs, [hidden]")) return false;
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    return own && element.getClientRects().length;
  });
}

function smallestText() {
  return Math.min(...texts().map((element) => parseFloat(getComputedStyle(element).fontSize)));
}

function colour(words) {
  const [red, green, blue, alpha = 1] = words.match(/[\d.]+/g).map(Number);
  return { channels: [red, green, blue], alpha };
}

function over(front, back) {
  return front.channels.map((channel, n) => front.alpha * channel + (1 - front.alpha) * back[n]);
}

// As WCAG defines it.
function luminance(channels) {
  const [red, green, blue] = channels.map((channel) => {
    const share = channel / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function paper() {
  return luminance(behind(document.body));
}

// What an element of HTML stands on.
function behind(element) {
  const layers = [];
  for (let one = element; one; one = one.parentElement) layers.push(colour(getComputedStyle(one).backgroundColor));
  return layers.reduceRight((back, layer) => over(layer, back), [255, 255, 255]);
}

// What a text of SVG stands on: its own halo, or the bars under its middle.
function beneath(text) {
  const style = getComputedStyle(text);
  if (parseFloat(style.strokeWidth) > 3) return colour(style.stroke).channels;
  const box = text.getBoundingClientRect();
  const middle = [box.left + box.width / 2, box.top + box.height / 2];
  const bars = document.elementsFromPoint(...middle).filter((one) => one.tagName === "rect");
  return bars.reverse().reduce((back, bar) => {
    const { fill, fillOpacity } = getComputedStyle(bar);
    if (!fill.startsWith("rgb")) return back;
    const { channels, alpha } = colour(fill);
    return over({ channels, alpha: alpha * fillOpacity }, back);
  }, behind(text.closest(".chart")));
}

function contrasts() {
  return texts().map((element) => {
    const inChart = element.ownerSVGElement;
    const back = inChart ? beneath(element) : behind(element);
    const style = getComputedStyle(element);
    const front = over(colour(inChart ? style.fill : style.color), back);
    const [less, more] = [luminance(front), luminance(back)].sort((one, other) => one - other);
    return {
      words: element.textContent.trim(),
      look: element.getAttribute("class") || "",
      contrast: (more + 0.05) / (less + 0.05),
    };
  });
}

function visible(selector) {
  return [...document.querySelectorAll(selector)].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.width + box.height > 0 && box.right > 0 && box.left < innerWidth;
  }).length;
}

function firstChart() {
  const chart = document.querySelector("#moment-1-chart");
  return {
    width: parseFloat(chart.querySelector("rect.hold").getAttribute("width")),
    ticks: [...chart.querySelectorAll(".ticks text")].map((text) => text.textContent),
  };
}
