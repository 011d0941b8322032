// Runs last: if app.js did not run, say what the page needs. Every browser understands this code.
if (!window.showPage || document.querySelector("main").hidden) {
  document.querySelector("main").hidden = true;
  document.getElementById("failure").textContent = document.querySelector("noscript").textContent;
  document.getElementById("failure").hidden = false;
}
