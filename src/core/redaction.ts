import type { NewEvent } from './event.ts';

/** Finds secrets in text. `name` stands in the placeholder: `[redacted:NAME]`. */
export interface Detector {
  name: string;
  pattern: RegExp;
}

/** Shapes of credentials that have no business in a log, whoever printed them. */
export const DETECTORS: readonly Detector[] = [
  {
    name: 'private-key',
    pattern: /-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----/g,
  },
  // With a digit and a capital: `.sk-folding-cube-container` is a class name, not a key.
  {
    name: 'api-key',
    pattern: /\b(?:sk|pk|rk)-(?=[\w-]*\d)(?=[\w-]*[A-Z])[A-Za-z0-9_-]{20,}\b/g,
  },
  { name: 'aws-key', pattern: /\b(?:AKIA|ASIA)[A-Z0-9]{16}\b/g },
  { name: 'github-token', pattern: /\bgh[pousr]_[A-Za-z0-9]{36,}\b/g },
  { name: 'webhook-secret', pattern: /\bwhsec_[A-Za-z0-9+/=]{24,}/g },
];

/**
 * The one redaction point. It runs inside a run's single append, so nothing reaches log, trace or
 * artifact around it. `secrets` are exact values known to the process (API keys); shorter than eight
 * characters are ignored, since replacing them would shred ordinary text.
 */
export class Redactor {
  readonly #secrets: string[];
  readonly #detectors: readonly Detector[];

  constructor(secrets: Iterable<string> = [], detectors: readonly Detector[] = DETECTORS) {
    this.#secrets = [...secrets]
      .filter((secret) => secret.length >= 8)
      .sort((a, b) => b.length - a.length);
    this.#detectors = detectors;
  }

  /** Whether a value holds a placeholder of a redaction. */
  static marked(value: unknown): boolean {
    return /\[redacted:[a-z-]+\]/.test(JSON.stringify(value) ?? '');
  }

  text(text: string): string {
    let out = text;
    for (const secret of this.#secrets) {
      if (out.includes(secret)) out = out.replaceAll(secret, '[redacted:secret]');
    }
    for (const detector of this.#detectors)
      out = out.replace(detector.pattern, `[redacted:${detector.name}]`);
    return out;
  }

  /** Redacts every string inside a JSON value, keys too. Returns the same object when nothing changed. */
  json<T>(value: T): T {
    if (typeof value === 'string') return this.text(value) as T;
    if (Array.isArray(value)) {
      const out = value.map((item) => this.json(item));
      return out.some((item, i) => item !== value[i]) ? (out as T) : value;
    }
    if (value !== null && typeof value === 'object') {
      const entries = Object.entries(value);
      const clean = entries.map(([key, item]) => [this.text(key), this.json(item)] as const);
      const changed = clean.some(
        ([key, item], i) => key !== entries[i]![0] || item !== entries[i]![1],
      );
      // fromEntries defines own properties, `__proto__` among them: assignment would lose that one.
      return changed ? (Object.fromEntries(clean) as T) : value;
    }
    return value;
  }

  event(event: NewEvent): NewEvent {
    const data = this.json(event.data as unknown);
    return data === event.data ? event : ({ type: event.type, data } as NewEvent);
  }
}
