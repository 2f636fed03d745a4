"use strict";
// before the first paint, so that a chosen theme does not flash
{
  const chosen = localStorage.getItem("slime-theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
}
