const tip = document.getElementById("tip");
const asText = value => value === null ? "not a number" : Number(value.toPrecision(5)).toString();
for (const svg of document.querySelectorAll("svg[data-lines]")) {
  const values = JSON.parse(svg.dataset.lines), cursor = svg.querySelector(".cursor");
  const [x0, x1] = values.x, [p0, p1] = values.px, width = svg.viewBox.baseVal.width;
  const nearest = (points, x) => points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * width;
    const wanted = x0 + (Math.min(Math.max(place, p0), p1) - p0) / (p1 - p0) * (x1 - x0);
    const step = nearest(values.lines.flatMap(line => line.points), wanted)[0];
    const at = p0 + (step - x0) / (x1 - x0) * (p1 - p0);
    cursor.setAttribute("x1", at); cursor.setAttribute("x2", at);
    const shown = values.lines.filter(line => line.points.length).map(line => {
      const point = nearest(line.points, step);
      return `${line.name}  ${asText(point[1])}` + (point[0] === step ? "" : `  (step ${point[0]})`);
    });
    tip.textContent = [`step ${step}`, ...shown].join("\n");
    tip.style.display = "block";
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  });
  svg.addEventListener("pointerleave", () => {
    tip.style.display = "none"; cursor.setAttribute("x1", -9); cursor.setAttribute("x2", -9);
  });
}
