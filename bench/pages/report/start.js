// ---- begin ----
followers.push(standings, fillBoards, fillBoard, filterFigures, fillCosts, fillScaling, fillMethods, fillRuns);
refilter();
themed();
openTarget();
const marked = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const link = document.querySelector(`#contents a[href="#${CSS.escape(entry.target.id)}"]`);
    if (link) link.setAttribute("aria-current", String(entry.isIntersecting));
  }
}, { rootMargin: "-15% 0px -75% 0px" });
document.querySelectorAll("main > section").forEach((section) => marked.observe(section));
if (innerWidth < 992) document.querySelector("#contents details").open = false;
document.documentElement.dataset.ready = "true";
