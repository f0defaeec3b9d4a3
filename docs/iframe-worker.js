// The search runs in a worker, which browsers refuse on a page that was opened as a file. There a
// hidden frame takes the worker's place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      addEventListener("message", event => {
        if (event.source === inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      this.ready = new Promise(resolve => {
        inside.document.open()
        inside.document.write("<!doctype html><html><body></body></html>")
        inside.document.close()
        // what the worker posts comes from the frame to the page
        inside.postMessage = data => window.dispatchEvent(
          new MessageEvent("message", { data, source: inside })
        )
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = resolve
        inside.document.body.appendChild(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(
        new MessageEvent("message", { data })
      ))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
