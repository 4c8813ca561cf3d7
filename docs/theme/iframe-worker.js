// Browsers start no worker from a page that was opened from the disk. Here its script runs in a hidden frame instead, so
// that search works there, too.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const code = this.frame.contentDocument.createElement("script");
      code.src = script;
      code.onload = () => {
        this.waiting.forEach((data) => this.tell(data));
        this.waiting = null;
      };
      this.frame.contentDocument.head.append(code);
    }

    tell(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.tell(data);
    }
  };
}
