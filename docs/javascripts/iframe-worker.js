/* The manual's search, read from files on a disk: a browser starts no worker there, so a hidden frame does its work. */
"use strict";

class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    this.frame.srcdoc = "<!doctype html><body></body>";
    this.ready = new Promise((resolve, reject) => {
      this.frame.addEventListener("load", () => this.begin(url).then(resolve, reject), { once: true });
    });
    document.body.append(this.frame);
  }

  /* Gives the frame what a worker has, and runs the script in it. */
  begin(url) {
    const inside = this.frame.contentWindow;
    const load = (address) =>
      new Promise((resolve, reject) => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.addEventListener("load", resolve);
        script.addEventListener("error", () => reject(new Error(`cannot load ${address}`)));
        inside.document.body.append(script);
      });
    inside.postMessage = (data) => this.answer(data);
    inside.importScripts = async (...addresses) => {
      for (const address of addresses) await load(address);
    };
    return load(url);
  }

  answer(data) {
    const message = new MessageEvent("message", { data: structuredClone(data) });
    this.dispatchEvent(message);
    this.onmessage?.(message);
  }

  async postMessage(data) {
    await this.ready;
    const inside = this.frame.contentWindow;
    inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) }));
  }

  terminate() {
    this.frame.remove();
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
