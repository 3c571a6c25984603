// The words of the shell.

const words = {
  en: {
    "skip": "Skip to the content",
    "views": "Views",
    "language": "Language",
    "theme": "Theme",
    "theme system": "As the system",
    "theme light": "Light",
    "theme dark": "Dark",
    "no server": "The server does not answer. Start `roundelay web` again.",
    "busy": "The server has too much to do. Try again in a moment.",
    "no token": "This page needs its token. Open the address that `roundelay web` has printed.",
    "no view": "There is no view called “{name}”.",
    "broken view": "The view “{name}” could not be loaded.",
  },
  zh: {
    "skip": "跳到正文",
    "views": "视图",
    "language": "语言",
    "theme": "主题",
    "theme system": "跟随系统",
    "theme light": "浅色",
    "theme dark": "深色",
    "no server": "服务器没有应答。请重新运行 `roundelay web`。",
    "busy": "服务器正忙，请稍后再试。",
    "no token": "此页面需要令牌。请打开 `roundelay web` 打印出的地址。",
    "no view": "没有名为“{name}”的视图。",
    "broken view": "视图“{name}”加载失败。",
  },
};

export { words };
