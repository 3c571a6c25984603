// The words of the pictures, in every language; which one it is, is said once, before drawing.

const WORDS = {
  en: {
    "start": "Start",
    "start of": "Start, {n} steps",
    "start of.one": "Start, {n} step",
    "step": "step {n}",
    "step of": "Step {n} of {last}",
    "fails": "{said}, fails",
    "the end": "end",
    "rank": "rank",
    "chunks": "{n} chunks",
    "some chunks": "{names}, … {n} chunks",
    "reduce": "{what} (reduce)",
    "copy": "{what} (copy)",
    "then holds": "{moved}. {rank} then holds {what}",
    "what each holds": "What each rank holds",
    "broken": "This schedule does not keep its contract: {n} failures. See",
    "broken.one": "This schedule does not keep its contract: {n} failure. See",
    "more steps": " and {n} more steps",
    "more": "… and {n} more",
    "nothing moved": "Nothing has moved yet.",
    "point": "Point at an arrow or a line of the list to read it.",
    "one rank": "One rank has nothing to send.",
    "player": "Player",
    "slider": "Step",
    "first": "First (Home)",
    "prev": "Previous step (left arrow)",
    "play": "Play",
    "pause": "Pause",
    "next": "Next step (right arrow)",
    "last": "Last (End)",
    "by space": "{what} (space)",
    "legend": "Legend",
    "bars": "one bar per rank whose contribution is in",
    "gauge": "share of the contributions that is in",
    "finished": "finished",
    "added": "reduce: added to what is there",
    "replaced": "copy: takes its place",
    "to step": "step",
    "to jump": "jump",
    "to play": "play",
    "space": "Space",
  },
  zh: {
    "start": "开始",
    "start of": "开始，共 {n} 步",
    "start of.one": "开始，共 {n} 步",
    "step": "第 {n} 步",
    "step of": "第 {n} 步，共 {last} 步",
    "fails": "{said}，出错",
    "the end": "结束时",
    "rank": "rank",
    "chunks": "{n} 块",
    "some chunks": "{names}，… 共 {n} 块",
    "reduce": "{what}（规约）",
    "copy": "{what}（拷贝）",
    "then holds": "{moved}。之后 {rank} 持有 {what}",
    "what each holds": "每个 rank 持有什么",
    "broken": "这个调度不满足约定：{n} 处错误。见",
    "broken.one": "这个调度不满足约定：{n} 处错误。见",
    "more steps": "，另有 {n} 步",
    "more": "… 另有 {n} 处",
    "nothing moved": "还没有数据移动。",
    "point": "指向箭头或列表中的一行，查看详情。",
    "one rank": "只有一个 rank，无需发送。",
    "player": "播放器",
    "slider": "步",
    "first": "回到开头（Home）",
    "prev": "上一步（左箭头）",
    "play": "播放",
    "pause": "暂停",
    "next": "下一步（右箭头）",
    "last": "跳到结尾（End）",
    "by space": "{what}（空格）",
    "legend": "图例",
    "bars": "每条竖线：一个 rank 的贡献已加入",
    "gauge": "已加入的贡献所占比例",
    "finished": "已完成",
    "added": "规约（reduce）：与已有数据相加",
    "replaced": "拷贝（copy）：替换已有数据",
    "to step": "单步",
    "to jump": "跳转",
    "to play": "播放",
    "space": "空格",
  },
};

let current = "en";

function speak(language) {
  current = Object.hasOwn(WORDS, language) ? language : "en";
}

// Fill the gaps of a phrase; of one thing, the phrase for one is taken where there is one.
function phrase(words, key, values = {}) {
  const found = (values.n === 1 && words[`${key}.one`]) || words[key];
  return found.replace(/\{(\w+)\}/g, (gap, name) => (name in values ? String(values[name]) : gap));
}

function say(key, values) {
  return phrase(WORDS[current], key, values);
}

export { WORDS, phrase, say, speak };
