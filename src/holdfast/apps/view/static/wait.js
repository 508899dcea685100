// @ts-check
// Waits on a page whose content is still being made, and loads it again when that is done.
// The page that is done does not load this module, by which it is recognised.

const PAUSE = 1000;
/** @type {number | undefined} */
let timer;

async function look() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const response = await fetch(location.href);
    const text = await response.text();
    if (!text.includes('src="/static/wait.js"')) {
      location.reload();
      return;
    }
    const share = /<progress[^>]*data-wait[^>]* value="([\d.]+)"/.exec(text);
    const bar = document.querySelector("progress[data-wait]");
    if (share && bar instanceof HTMLProgressElement) bar.value = Number(share[1]);
  } catch {
    // The server does not answer. It may be started again.
  }
  timer = setTimeout(look, PAUSE);
}

document.addEventListener("visibilitychange", look);
timer = setTimeout(look, PAUSE);
