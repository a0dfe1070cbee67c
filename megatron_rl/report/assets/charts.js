"use strict";
// Draws every chart when it comes near the window, and again when the colour scheme changes.
const report = (() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)"), touch = matchMedia("(hover: none)");
  const figures = new Map();

  function recoloured(value) {
    if (typeof value === "string") return dark.matches ? data.dark[value] ?? value : value;
    if (Array.isArray(value)) return typeof value[0] === "object" && value[0] ? value.map(recoloured) : value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recoloured(item)]));
    return value;
  }

  function themed(layout) {
    const style = getComputedStyle(document.documentElement);
    const tone = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: tone("--grid"), linecolor: tone("--line"), zeroline: false,
      ticks: "outside", tickcolor: tone("--line"), ticklen: 4 };
    const titled = (one) => ({ ...axis, ...one, title: { ...one?.title, font: { size: 11, color: tone("--soft") }, standoff: 8 } });
    return {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 11, color: tone("--text") },
      margin: { l: 64, r: 12, t: 18, b: 38 }, hovermode: layout.hovermode ?? "x unified", dragmode: touch.matches ? false : "zoom",
      hoverlabel: { bgcolor: tone("--card"), bordercolor: tone("--line"), font: { color: tone("--text"), size: 11 }, namelength: -1 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemwidth: 18, font: { size: 11 }, bgcolor: "rgba(0,0,0,0)" },
      modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)", color: tone("--soft"), activecolor: tone("--accent") },
      xaxis: titled(layout.xaxis), yaxis: titled(layout.yaxis),
    };
  }

  // these alone: plotly has one that sends a chart to its maker's server. Where nothing hovers they would lie on the
  // chart for good, and a finger that zooms could not scroll
  const options = { displaylogo: false, responsive: true, showSendToCloud: false, plotlyServerURL: "",
    displayModeBar: touch.matches ? false : "hover",
    modeBarButtons: [["resetScale2d"], ["zoom2d", "pan2d"], ["toImage"]] };

  function draw(place) {
    const figure = figures.get(place);
    const layout = recoloured(themed(figure.layout));
    const named = figure.data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap");
    layout.showlegend = named.length > 1;
    // labels of stage borders stand where the legend would begin
    if (layout.showlegend && layout.annotations?.length) { layout.legend.y = 1.08; layout.margin.t = 28; }
    return Plotly.react(place, recoloured(figure.data), layout, options);
  }

  const near = new IntersectionObserver((entries) => {
    for (const entry of entries)
      if (entry.isIntersecting) { near.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "700px" });
  // what is watched already would not be told of again
  const watch = (place) => { near.unobserve(place); near.observe(place); };
  for (const place of document.querySelectorAll(".plot[data-figure]")) {
    figures.set(place, data.figures[place.dataset.figure]);
    watch(place);
  }
  dark.addEventListener("change", () => figures.forEach((_, place) => watch(place)));

  // any metric by name
  const pick = document.getElementById("metric");
  if (pick) {
    const place = document.getElementById("metric-plot");
    for (const name of Object.keys(data.metrics)) pick.add(new Option(name, name));
    const show = () => { figures.set(place, data.metrics[pick.value]); watch(place); };
    pick.addEventListener("change", show);
    show();
  }
  return { data, dark };
})();
